//! What only the node does at which a message entered.

pub mod history;
pub mod metering;
