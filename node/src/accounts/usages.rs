//! Usage counters of every account, which outlive each reading of the directory.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::model::{AccountId, Usage};

#[derive(Default)]
pub struct Usages(Mutex<HashMap<AccountId, Arc<Usage>>>);

impl Usages {
    /// The counters of the account, created by the first call.
    pub fn of(&self, account: &AccountId) -> Arc<Usage> {
        Arc::clone(self.0.lock().entry(account.clone()).or_default())
    }

    /// Calls `see` with every account, then forgets those without counts and without other holders.
    pub fn visit(&self, mut see: impl FnMut(&AccountId, &Usage)) {
        self.0.lock().retain(|account, usage| {
            see(account, usage);
            Arc::strong_count(usage) > 1 || !usage.is_empty()
        });
    }
}

impl fmt::Debug for Usages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Usages").field("accounts", &self.0.lock().len()).finish()
    }
}
