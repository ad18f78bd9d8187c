//! Value types. No I/O, no threads, no clock but the one that is passed in.

mod allow_rule;
mod amqp_url;
mod attached;
mod bare_secret;
mod capability;
mod clock;
mod digest;
mod forwarded;
mod guard;
mod ids;
mod limits;
mod message;
mod once;
mod presence;
mod presence_elsewhere;
mod revocation;
mod tenure;
mod usage;

pub use allow_rule::{AllowRule, Network};
pub use amqp_url::{AmqpUrl, ManagementUrl};
pub use attached::AttachedCount;
pub use bare_secret::bare_secret;
pub(crate) use capability::pattern_matches;
pub use capability::{Capability, CapabilityError, Operation};
pub use clock::{Cause, Clock, ClockState, Left, STEP_MS, since_boot_ms};
pub use digest::Digest;
pub use fanfare_proto::frame::Draft;
pub use forwarded::{Forwarded, ForwardedParts};
pub use guard::{Guard, literal_address};

pub use ids::{AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, KeyName, NameError};
pub(crate) use ids::{check_name, random_bytes};
pub use limits::{FORWARD_BYTES_MAX, Limits};
pub use message::{DraftError, Message, Published, Stamp, check_draft, draft_bytes, message_bytes};
pub use once::{GivenIds, IdScope, KeptNonce, Nonce, NoncePage, StampedIds};
pub use presence::{FormerMember, MemberData, MemberId, PresenceAction, PresenceEvent, PresenceStamp};
pub use presence_elsewhere::{ForwardedPresence, ToldMember, ToldMembers};
pub use revocation::Revocation;
pub use tenure::{NotOpen, Over, Owner, Place, Run, SEATS_SETTLE, TakenUp, Tenure};
pub use usage::{Amount, Usage, UsageKind};
