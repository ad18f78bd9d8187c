//! What events are delivered to in measurements: a receiver of webhooks, and a loop that publishes to a broker alone.

pub mod confirm;
pub mod receiver;
