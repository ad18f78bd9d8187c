//! Receivers of events in measurements: a receiver of webhooks, and a loop that publishes to a broker alone.

pub mod confirm;
pub mod receiver;
