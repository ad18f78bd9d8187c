//! Memory of the presence members of all channels, held against one bound of the node.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::model::{AccountId, ChannelKey, MemberData, MemberId};

/// Memory of a member beside its texts: its entries in the lists of its channel and of its connection, and its share of
/// the channel that lives for it.
const MEMBER_BYTES: usize = 1024;

/// Memory of one member, roughly.
pub(super) fn of_member(key: &ChannelKey, member: &MemberId, data: &MemberData) -> usize {
    let names = key.channel().len() + member.client_id.as_str().len();
    MEMBER_BYTES + names + data.as_ref().map_or(0, |data| data.get().len())
}

#[derive(Debug, Default)]
pub(super) struct MemberBytes(Mutex<HeldMemberBytes>);

#[derive(Debug, Default)]
struct HeldMemberBytes {
    all: usize,
    /// Bytes for each account that has members.
    accounts: HashMap<AccountId, usize>,
}

impl MemberBytes {
    /// Replaces a reservation of `previous` bytes by one of `bytes`, if the budget allows it. One account gets at most
    /// three quarters of `bytes_max`, so that others can enter too.
    pub(super) fn exchange(
        &self,
        account: &AccountId,
        previous: usize,
        bytes: usize,
        bytes_max: usize,
    ) -> bool {
        if bytes <= previous {
            self.give_back(account, previous - bytes);
            return true;
        }
        let more = bytes - previous;
        let mut held = self.0.lock();
        let of_account = more + held.accounts.get(account).copied().unwrap_or_default();
        if of_account > bytes_max / 4 * 3 || held.all + more > bytes_max {
            return false;
        }
        held.all += more;
        held.accounts.insert(account.clone(), of_account);
        true
    }

    pub(super) fn give_back(&self, account: &AccountId, bytes: usize) {
        if bytes == 0 {
            return;
        }
        let mut held = self.0.lock();
        held.all = held.all.saturating_sub(bytes);
        if let Some(of_account) = held.accounts.get_mut(account) {
            *of_account = of_account.saturating_sub(bytes);
            if *of_account == 0 {
                held.accounts.remove(account);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_leaves_quarter_of_member_bytes_to_others() {
        let (held, one, other) = (MemberBytes::default(), AccountId::new("one"), AccountId::new("other"));
        assert!(!held.exchange(&one, 0, 301, 400));
        assert!(held.exchange(&one, 0, 300, 400));
        assert!(!held.exchange(&one, 100, 101, 400), "no byte more");
        assert!(!held.exchange(&other, 0, 101, 400));
        assert!(held.exchange(&other, 0, 100, 400));
        assert!(held.exchange(&one, 300, 200, 400), "less is always taken");
        assert!(held.exchange(&other, 0, 100, 400), "there is room again");
        held.give_back(&one, 200);
        held.give_back(&other, 200);
        assert!(held.0.lock().all == 0 && held.0.lock().accounts.is_empty());
    }
}
