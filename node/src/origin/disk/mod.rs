//! The common parts of the databases on the local disk: their tables, the queue before their writer, and how the disk fares.

pub(super) mod engine;
pub(super) mod health;
pub(super) mod queue;
pub(super) mod snapshot;
pub mod tables;
