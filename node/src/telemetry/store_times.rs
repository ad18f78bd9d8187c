//! How long a store takes for what it is asked.

use std::time::Instant;

use metrics::Histogram;

/// What a store is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreOperation {
    Append,
    Read,
    FindIds,
    Claim,
    /// What comes seldom: revocations, queues, counts of accounts.
    Other,
}

impl StoreOperation {
    pub const ALL: [Self; 5] = [Self::Append, Self::Read, Self::FindIds, Self::Claim, Self::Other];

    const fn name(self) -> &'static str {
        match self {
            Self::Append => "append",
            Self::Read => "read",
            Self::FindIds => "find_ids",
            Self::Claim => "claim",
            Self::Other => "other",
        }
    }
}

/// One observation for each call of the disk or the database: many publishes may be one.
pub struct StoreTimes([Histogram; StoreOperation::ALL.len()]);

impl StoreTimes {
    /// `store` is the kind of it, and `operations` are those that it tells of.
    pub fn new(store: &'static str, operations: &[StoreOperation]) -> Self {
        Self(StoreOperation::ALL.map(|operation| match operations.contains(&operation) {
            true => metrics::histogram!(
                "fanfare_store_duration_seconds", "store" => store, "operation" => operation.name()
            ),
            false => Histogram::noop(),
        }))
    }

    /// Counts one that was begun then and has just ended, well or not.
    pub fn ended(&self, operation: StoreOperation, begun: Instant) {
        self.0[operation as usize].record(begun.elapsed().as_secs_f64());
    }
}
