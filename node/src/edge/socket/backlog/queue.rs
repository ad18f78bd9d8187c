//! The queue of queries that wait for the store or for peers.

use std::collections::{HashMap, VecDeque};

use super::{ASKED_MAX, BacklogRequest};
use crate::model::AccountId;

/// Waiting queries; accounts take turns. A query that does not fit is dropped, which answers it.
#[derive(Default)]
pub(super) struct BacklogQueue {
    accounts: HashMap<AccountId, VecDeque<BacklogRequest>>,
    /// Accounts with waiting queries, each once.
    order: VecDeque<AccountId>,
    count: usize,
}

impl BacklogQueue {
    pub(super) fn push(&mut self, request: BacklogRequest) {
        let account = request.channel.key().account();
        let requests = self.accounts.entry(account.clone()).or_default();
        if self.count >= ASKED_MAX || requests.len() >= ASKED_MAX / 2 {
            return;
        }
        if requests.is_empty() {
            self.order.push_back(account.clone());
        }
        requests.push_back(request);
        self.count += 1;
    }

    pub(super) fn next(&mut self) -> Option<BacklogRequest> {
        let account = self.order.pop_front()?;
        let requests = self.accounts.get_mut(&account)?;
        let request = requests.pop_front();
        if requests.is_empty() {
            self.accounts.remove(&account);
        } else {
            self.order.push_back(account);
        }
        self.count -= usize::from(request.is_some());
        request
    }
}
