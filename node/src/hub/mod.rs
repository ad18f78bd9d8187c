//! This node's channels: who numbers, who listens, and the frame that each publish becomes.

mod channels;
mod delivery;
mod inbox;
mod outbox;
mod resume;
mod ring;
mod subscribers;
#[cfg(test)]
mod tests;
pub mod wire;

pub use channels::{Channel, DeliveryTarget, Hub, Numbering};
pub use delivery::Delivery;
pub use inbox::Inbox;
pub use outbox::{Flush, Outbox};
pub use resume::{Joined, Pulled, Start};
pub use subscribers::{Subscriber, Subscribers};
