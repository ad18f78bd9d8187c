//! Durations of store operations.

use std::time::Instant;

use metrics::Histogram;

/// Kinds of store operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreOperation {
    Append,
    Read,
    FindIds,
    Claim,
    /// Rare operations: revocations, queues, counts of accounts.
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

/// Histograms with one observation for each call of the disk or the database, which may serve many publishes.
pub struct StoreTimes([Histogram; StoreOperation::ALL.len()]);

impl StoreTimes {
    /// Registers the histograms. `store` is the kind of store, and `operations` are those that it measures.
    pub fn new(store: &'static str, operations: &[StoreOperation]) -> Self {
        Self(StoreOperation::ALL.map(|operation| match operations.contains(&operation) {
            true => metrics::histogram!(
                "fanfare_store_duration_seconds", "store" => store, "operation" => operation.name()
            ),
            false => Histogram::noop(),
        }))
    }

    /// Records an operation that began then and has just ended, successfully or not.
    pub fn ended(&self, operation: StoreOperation, begun: Instant) {
        self.0[operation as usize].record(begun.elapsed().as_secs_f64());
    }
}
