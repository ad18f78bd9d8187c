//! This node's channels: who numbers, who listens, and the frame that each publish becomes.

mod batches;
mod budget;
mod channels;
mod delivery;
mod few;
mod former;
mod from_store;
mod hand_over;
mod inbox;
mod interest;
mod mark;
mod member_bytes;
mod members;
mod outbox;
mod presence;
mod presence_elsewhere;
mod resume;
mod ring;
mod roster;
mod subscribers;
mod sweep;
mod sync;
#[cfg(test)]
mod tests;
mod whole;
pub mod wire;

pub use channels::{Channel, DeliveryTarget, Hub, Numbering};
pub use delivery::{Content, Delivery};
pub use hand_over::HandedOver;
pub use inbox::Inbox;
pub use interest::{Interest, Joins, Waiter};
pub use mark::{Mark, Spot};
pub use members::{Member, Page};
pub use outbox::{Begun, Flush, Outbox};
pub use presence::{Change, MemberEvent, PresenceDelivery, PresenceRefused};
pub use resume::{Joined, Pulled, Recent, RecentAfter, Refill, Start};
pub use roster::{Digests, PARTS, channel_number, is_in};
pub use subscribers::{PresenceMode, Subscriber, Subscribers};
pub use sync::{Sync, Verdict};
