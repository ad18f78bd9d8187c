//! Value types. No I/O, no threads, no clock but the one that is passed in.

mod allow_rule;
mod amqp_url;
mod attached;
mod bare_secret;
mod capability;
mod claims;
mod clock;
mod digest;
mod forwarded;
mod guard;
mod ids;
mod limits;
mod message;
mod presence;
mod remote_members;
mod revocation;
mod session_ownership;
mod usage;

pub use allow_rule::{AllowRule, Network};
pub use amqp_url::{AmqpUrl, ManagementUrl};
pub use attached::AttachedCount;
pub use bare_secret::bare_secret;
pub(crate) use capability::pattern_matches;
pub use capability::{Capability, CapabilityError, Operation};
pub use clock::{Clock, ClockCheckpoint, ClockState, ClockStepCause, STEP_MS, since_boot_ms};
pub use digest::Digest;
pub use fanfare_proto::frame::Draft;
pub use forwarded::{ForwardedMessages, ForwardedParts};
pub use guard::{AddressGuard, literal_address};

pub use claims::{ClaimedNonce, ClientMessageIds, IdScope, Nonce, NoncePage, StampedIds};
pub use ids::{AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, KeyName, NameError};
pub(crate) use ids::{check_name, random_bytes};
pub use limits::{FORWARD_BYTES_MAX, Limits};
pub use message::{DraftError, Message, PublishedMessages, Stamp, check_draft, draft_bytes, message_bytes};
pub use presence::{MemberData, MemberId, PresenceAction, PresenceEvent, PresenceStamp, RestoredMember};
pub use remote_members::{ForwardedPresence, RemoteMember, RemoteMembersPage};
pub use revocation::Revocation;
pub use session_ownership::{
    ClosedSession, IncarnationStatus, QUOTA_SLOTS_SETTLE, SessionLocation, SessionOwner, SessionOwnership,
    SessionTakeover, SocketlessTakeover,
};
pub use usage::{Amount, Usage, UsageKind};
