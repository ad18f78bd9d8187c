//! Channels of this node: numbering, subscribers, and the encoding of each publish as a frame.

mod batch_interval;
mod channel_position;
mod channels;
mod contiguous;
mod delivery;
mod handoff;
mod inbox;
mod incarnation_set;
mod interest;
mod member_bytes;
mod member_sync;
mod members;
mod outbox;
mod presence;
mod remote_members;
mod replay_budget;
mod replay_buffer;
mod resume;
mod retired;
mod roster;
mod store_backfill;
mod subscribers;
mod sweep;
#[cfg(test)]
mod tests;
pub mod wire;

pub use channel_position::{ChannelPosition, LocalOffset};
pub use channels::{Channel, DeliveryTarget, Hub, Numbering};
pub use delivery::{DeliveryContent, MessageDelivery};
pub use handoff::ReplayHandoff;
pub use inbox::Inbox;
pub use interest::{AnnounceResult, AttachWaiter, InterestAnnouncer};
pub use member_sync::{MemberSync, SyncVerdict};
pub use members::{MemberPage, PresentMember};
pub use outbox::{Flush, PriorWrite, SocketOutbox};
pub use presence::{MemberEvent, PresenceChange, PresenceDelivery, PresenceRefusal};
pub use resume::{AgedReplayStart, AttachResult, ChannelBackfill, ReplayPage, ResumeStart, RewindStart};
pub use roster::{PARTS, PresenceDigests, channel_number, is_in};
pub use subscribers::{PresenceMode, Subscriber, Subscribers};
