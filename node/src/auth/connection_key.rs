//! Connection key: with it a client resumes its former connection. Sealed, so that only nodes can read it.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::Principal;
use crate::model::{ClientId, ConnectionId, SessionLocation, SessionOwnership, random_bytes};

/// Bound of the keys that nodes write.
const TEXT_BYTES_MAX: usize = 256;
const VERSION: u8 = 1;
const LOCATION_BYTES: usize = 8 + 2 + 4 + 4;
const PLAIN_BYTES: usize = 1 + 16 + 8 + LOCATION_BYTES;

/// Seals and opens connection keys under one secret of 32 bytes, and opens those of further secrets while secrets are
/// rotated.
pub struct ConnectionKeys {
    own: LessSafeKey,
    others: Vec<LessSafeKey>,
}

impl ConnectionKeys {
    pub const SECRET_BYTES: usize = 32;

    pub fn new(secret: &[u8; Self::SECRET_BYTES]) -> Self {
        Self { own: key_of(secret), others: Vec::new() }
    }

    /// Adds a secret whose keys are opened too.
    pub fn opening(mut self, secret: &[u8; Self::SECRET_BYTES]) -> Self {
        self.others.push(key_of(secret));
        self
    }

    /// Seals a key that [`ConnectionKeys::open`] accepts only for the same account, key and client id.
    pub fn seal(
        &self,
        ownership: &SessionOwnership,
        principal: &Principal,
        client_id: Option<&ClientId>,
    ) -> String {
        let SessionOwnership { connection_id, epoch, location } = ownership;
        let mut sealed = Vec::with_capacity(PLAIN_BYTES + AES_256_GCM.tag_len() + NONCE_LEN);
        sealed.push(VERSION);
        sealed.extend_from_slice(connection_id.as_bytes());
        sealed.extend_from_slice(&epoch.to_be_bytes());
        sealed.extend_from_slice(&location.incarnation.to_be_bytes());
        sealed.extend_from_slice(&location.shard.to_be_bytes());
        sealed.extend_from_slice(&location.slot.to_be_bytes());
        sealed.extend_from_slice(&location.generation.to_be_bytes());
        let nonce: [u8; NONCE_LEN] = random_bytes();
        let bound = Aad::from(bound_to(principal, client_id));
        self.own
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), bound, &mut sealed)
            .expect("so few bytes can be sealed");
        sealed.extend_from_slice(&nonce);
        URL_SAFE_NO_PAD.encode(sealed)
    }

    /// Opens a key; none if it was not sealed here, or for another principal.
    pub fn open(
        &self,
        text: &str,
        principal: &Principal,
        client_id: Option<&ClientId>,
    ) -> Option<SessionOwnership> {
        if text.len() > TEXT_BYTES_MAX {
            return None;
        }
        let mut sealed = URL_SAFE_NO_PAD.decode(text).ok()?;
        let nonce: [u8; NONCE_LEN] = *sealed.last_chunk()?;
        sealed.truncate(sealed.len() - NONCE_LEN);
        let bound = bound_to(principal, client_id);
        let open = |key: &LessSafeKey| {
            let (nonce, mut sealed) = (Nonce::assume_unique_for_key(nonce), sealed.clone());
            let plain = key.open_in_place(nonce, Aad::from(&bound), &mut sealed).ok()?;
            <[u8; PLAIN_BYTES]>::try_from(&*plain).ok()
        };
        let plain = &std::iter::once(&self.own).chain(&self.others).find_map(open)?;
        if plain[0] != VERSION {
            return None;
        }
        let location = SessionLocation {
            incarnation: u64::from_be_bytes(part(plain, 25)),
            shard: u16::from_be_bytes(part(plain, 33)),
            slot: u32::from_be_bytes(part(plain, 35)),
            generation: u32::from_be_bytes(part(plain, 39)),
        };
        let connection_id = ConnectionId::from_bytes(part(plain, 1));
        Some(SessionOwnership { connection_id, epoch: u64::from_be_bytes(part(plain, 17)), location })
    }
}

impl fmt::Debug for ConnectionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConnectionKeys(…)")
    }
}

fn key_of(secret: &[u8; ConnectionKeys::SECRET_BYTES]) -> LessSafeKey {
    let key = UnboundKey::new(&AES_256_GCM, secret).expect("the secret has the length of the algorithm");
    LessSafeKey::new(key)
}

fn part<const N: usize>(plain: &[u8; PLAIN_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| plain[at + i])
}

/// The length-prefixed parts of the owner, so that no two owners have the same text.
fn bound_to(principal: &Principal, client_id: Option<&ClientId>) -> Vec<u8> {
    let mut bound = Vec::new();
    // A client id is never empty, so an empty text means none.
    let client_id = client_id.map_or("", ClientId::as_str);
    for name in [principal.account.id.as_str(), &principal.key_name, client_id] {
        bound.extend_from_slice(&(name.len() as u64).to_be_bytes());
        bound.extend_from_slice(name.as_bytes());
    }
    bound
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::accounts::Account;

    fn owner(account: &str, key_name: &str) -> Principal {
        let mut principal = Principal::anonymous(Arc::new(Account::plain(account)));
        principal.key_name = key_name.into();
        principal
    }

    fn ownership() -> SessionOwnership {
        let location = SessionLocation { incarnation: 1 << 60, shard: 3, slot: 1 << 30, generation: 7 };
        SessionOwnership { connection_id: ConnectionId::from_bytes([9; 16]), epoch: 1 << 40, location }
    }

    #[test]
    fn a_key_opens_for_its_owner_alone() {
        let keys = ConnectionKeys::new(&[1; 32]);
        let (all, chat) = (owner("acme", "all"), owner("acme", "chat"));
        let [ann, bob] = ["ann", "bob"].map(ClientId::of);
        let text = keys.seal(&ownership(), &all, Some(&ann));
        assert_eq!(keys.open(&text, &all, Some(&ann)), Some(ownership()));
        let other = owner("other", "all");
        for (principal, client_id) in
            [(&all, Some(&bob)), (&all, None), (&chat, Some(&ann)), (&other, Some(&ann))]
        {
            assert_eq!(keys.open(&text, principal, client_id), None);
        }
        assert_eq!(ConnectionKeys::new(&[2; 32]).open(&text, &all, Some(&ann)), None);
        assert_ne!(keys.seal(&ownership(), &all, Some(&ann)), text);
    }

    #[test]
    fn nodes_open_each_others_keys_while_secrets_change() {
        let earlier = ConnectionKeys::new(&[1; 32]).opening(&[2; 32]);
        let later = ConnectionKeys::new(&[2; 32]).opening(&[1; 32]);
        let all = owner("acme", "all");
        for (seals, opens) in [(&earlier, &later), (&later, &earlier), (&later, &later)] {
            assert_eq!(opens.open(&seals.seal(&ownership(), &all, None), &all, None), Some(ownership()));
        }
        let after = ConnectionKeys::new(&[2; 32]);
        assert_eq!(after.open(&earlier.seal(&ownership(), &all, None), &all, None), None);
    }

    #[test]
    fn altered_or_cut_connection_key_does_not_open() {
        let keys = ConnectionKeys::new(&[1; 32]);
        let all = owner("acme", "all");
        let text = keys.seal(&ownership(), &all, None);
        for at in 0..text.len() {
            let other = if text.as_bytes()[at] == b'A' { 'B' } else { 'A' };
            let mut touched = text.clone();
            touched.replace_range(at..=at, &other.to_string());
            assert_eq!(keys.open(&touched, &all, None), None, "{at}");
            assert_eq!(keys.open(&text[..at], &all, None), None);
        }
        for nonsense in ["", "AAAA", &"A".repeat(10_000), "é"] {
            assert_eq!(keys.open(nonsense, &all, None), None);
        }
    }
}
