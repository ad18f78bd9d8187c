//! Client of Fanfare's realtime socket, and the local signing of tokens.
//!
//! ```no_run
//! # async fn example() -> Result<(), fanfare_client::Error> {
//! use fanfare_client::{Client, Credential, Draft, Event, Options};
//!
//! let credential = Credential::Key("<secret>.<keyName>".into());
//! let mut client = Client::connect(Options::new("ws://127.0.0.1:8080", credential)).await?;
//! client.attach("greetings").await?;
//! client.publish("greetings", vec![Draft { name: Some("hello".into()), ..Draft::default() }]).await?;
//! while let Some(event) = client.next().await {
//!     if let Event::Messages(delivery) = event {
//!         println!("{} messages on {}", delivery.messages.len(), delivery.channel);
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! `wss` and `https` need the feature `tls`.
//!
//! Not there yet: reconnecting (the end of a connection is an [`Event::Ended`] and the caller connects again), and dropping
//! repeated message ids after a retry.

mod client;
mod error;
mod event;
mod handshake;
mod key;
mod options;
mod pending;
mod reader;
pub mod sign;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;
mod writer;

pub use client::{Client, Handle, Ticket};
pub use error::Error;
pub use event::{Attached, Connected, Delivery, Ending, Event, Members, Presence};
pub use fanfare_proto::frame::{Attach, Draft, Format, MemberIn, MessageIn, PresenceIn, PresenceRequest};
pub use key::Key;
pub use options::{Credential, Options};
