#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod answer;
mod auth_url;
mod backoff;
mod client;
mod credential;
mod dial;
mod driver;
mod error;
mod event;
mod handle;
mod handshake;
mod http;
mod key;
mod options;
mod queue;
mod reader;
mod seen;
mod session_state;
mod shared;
pub mod sign;
mod target;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;
mod writer;

pub use answer::TokenAnswer;
pub use auth_url::{AuthMethod, AuthUrl};
pub use client::Client;
pub use credential::{Credential, FetchError, TokenSource};
pub use error::Error;
pub use event::{Attached, ChannelOccupancy, Connected, Delivery, Ending, Event, Members, Presence};
pub use fanfare_proto::frame::{Attach, Draft, Format, MemberIn, MessageIn, PresenceIn, PresenceRequest};
pub use fanfare_proto::http::Occupancy;
pub use fanfare_proto::token::TokenDetails;
pub use handle::{Handle, Ticket};
pub use key::Key;
pub use options::{Options, Reconnect};
