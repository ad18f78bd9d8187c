//! The publish path of a node without its sockets, which makes the items that a link forwards.

use std::path::Path;
use std::sync::Arc;

use fanfare::accounts::Accounts;
use fanfare::auth::{Authenticator, Credentials, NonceClaim, Principal, RevocationWrite, TokenStore};
use fanfare::cluster::routing::{KeptNodes, Routing};
use fanfare::hub::Hub;
use fanfare::model::{ChannelKey, ChannelName, Clock, ConnectionId, Limits, Nonce, Revocation};
use fanfare::origin::history::{EmbeddedOptions, EmbeddedStore, HistoryStore};
use fanfare::publish::{PublishDone, PublishRequest, Publisher};
use fanfare::tasks::Tasks;
use fanfare::telemetry::TraceSpan;
use fanfare_proto::frame::Draft;
use serde_json::value::RawValue;

use crate::Result;

pub(super) struct Origin {
    pub(super) hub: Arc<Hub>,
    pub(super) routing: Arc<Routing>,
    publishing: Publishing,
}

/// A principal that publishes the same data to the channels it has.
pub struct Publishing {
    publisher: Publisher,
    principal: Principal,
    connection_id: ConnectionId,
    channels: Vec<ChannelKey>,
    data: Box<RawValue>,
}

impl Origin {
    /// Makes a principal with `channels` channels that keep no history; each message has `bytes` of data. Must run
    /// within a runtime.
    pub(super) fn new(folder: &Path, tasks: &Arc<Tasks>, channels: usize, bytes: usize) -> Result<Self> {
        let limits = Limits::default();
        let clock = Clock::system();
        let store = EmbeddedStore::open(folder, &EmbeddedOptions::new(false, &limits), clock.clone())?;
        let store = Arc::new(store) as Arc<dyn HistoryStore>;
        let hub = Arc::new(Hub::new(Vec::new(), clock.clone(), &limits));
        let kept = KeptNodes { counts: true, ..KeptNodes::default() };
        let routing = Routing::new(&hub, &"source".into(), kept, tasks);
        let publisher = Publisher::new(&hub, &store, &limits, Some(&routing));
        let names: Vec<String> = (0..channels).map(|nth| format!("bench:link:{nth}")).collect();
        let data = format!("\"{}\"", "x".repeat(bytes.saturating_sub(2)));
        let publishing = Publishing::new(publisher, clock, "bench", &names, data)?;
        Ok(Self { hub, routing, publishing })
    }

    pub(super) fn channels(&self) -> &[ChannelKey] {
        &self.publishing.channels
    }

    /// Publishes `messages` messages at once to the channel of that number.
    pub(super) fn publish(&self, channel: usize, messages: usize, done: PublishDone) {
        self.publishing.publish(channel, messages, done);
    }
}

impl Publishing {
    /// Makes the publishing side for an account that keeps the history of all channels.
    pub fn new(
        publisher: Publisher,
        clock: Clock,
        account: &str,
        channels: &[String],
        data: String,
    ) -> Result<Self> {
        let limits = Limits::default();
        let directory = format!(
            "[[tenants]]\nid = \"bench\"\n[[tenants.accounts]]\nid = \"{account}\"\n[[tenants.accounts.keys]]\n\
             name = \"key\"\nsecret = \"secret\"\nstatus = \"active\"\ncapability = {{ \"*\" = [\"publish\"] }}\n"
        );
        let auth = Authenticator::new(Accounts::from_text(&directory)?, NoTokenStore, clock, &limits, true);
        // The key `secret.key` in Basic authentication.
        let authorization = vec![&b"Basic c2VjcmV0LmtleQ=="[..]];
        let credentials = Credentials { authorization, query: "", socket: false, address: None };
        let principal = auth.authenticate(&credentials).map_err(|_| "the key of the directory is refused")?;
        let names = channels.iter().map(|name| ChannelName::new(name, &limits));
        let channels: std::result::Result<Vec<_>, _> = names.collect();
        let channels = channels?.into_iter().map(|name| principal.channel(name)).collect();
        let data = RawValue::from_string(data)?;
        let connection_id = ConnectionId::from_bytes([7; 16]);
        Ok(Self { publisher, principal, connection_id, channels, data })
    }

    pub fn channel(&self, number: usize) -> &ChannelKey {
        &self.channels[number]
    }

    /// Publishes `messages` messages at once to the channel of that number.
    pub fn publish(&self, channel: usize, messages: usize, done: PublishDone) {
        let draft = Draft { id: None, name: None, data: Some(self.data.clone()), extras: None };
        let request = PublishRequest {
            key: self.channels[channel % self.channels.len()].clone(),
            account: Arc::clone(&self.principal.account),
            key_name: self.principal.key_name.clone(),
            connection_id: self.connection_id,
            client_id: None,
            messages: vec![draft; messages],
            span: TraceSpan::default(),
        };
        self.publisher.publish(request, false, done);
    }
}

struct NoTokenStore;

impl TokenStore for NoTokenStore {
    fn claim_nonce(&self, _: Nonce) -> NonceClaim {
        Box::pin(async { Ok(true) })
    }

    fn keep_revocation(&self, _: Revocation) -> RevocationWrite {
        Box::pin(async { Ok(()) })
    }
}
