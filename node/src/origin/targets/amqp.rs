//! Publishes to AMQP brokers: one connection for each address, and a channel for each message under way.
//!
//! A message counts as delivered when the broker has confirmed it. A channel carries one message at a time, so a confirmation, a return,
//! or a channel error belongs to that message alone. A broker that is unreachable or blocks publishers is unavailable for all its targets,
//! and reconnected after a growing wait.

use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use async_rs::TokioRuntime;
use fanfare_proto::path::encode_channel;
use fanfare_proto::trace::{TRACEPARENT, TRACESTATE};
use fanfare_proto::webhook as headers;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::runtime::default_runtime;
use lapin::tcp::{AsyncTcpStream, TLSConfig};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ErrorKind};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Semaphore};
use tokio::time::{Instant, timeout};

use super::{DeliveryOutcome, TargetDelivery};
use crate::accounts::{AmqpTarget, TemplateValues};
use crate::model::AmqpUrl;

/// Time limit for the connection and its handshakes.
const CONNECT: Duration = Duration::from_secs(5);
/// Heartbeat interval; a broker that is silent for twice as long counts as disconnected.
const HEARTBEAT_S: u16 = 10;
/// Messages under way at one broker, if it allows as many channels.
const CHANNELS_MAX: u16 = 1_024;
/// Channels beside those for messages.
const CHANNELS_APART: u16 = 8;
/// Wait after a first failure to connect; doubled with each further one.
const RECONNECT: Duration = Duration::from_millis(500);
const RECONNECT_MAX: Duration = Duration::from_secs(10);
/// Wait before a broker that blocks publishers is tried again.
const BLOCKED: Duration = Duration::from_secs(1);
/// Time after which an unused connection is closed, when another one is opened.
const UNUSED: Duration = Duration::from_secs(60);
const IS_BLOCKED: &str = "the broker blocks publishers (connection.blocked)";
const REASON_CHARACTERS: usize = 200;
const PERSISTENT: u8 = 2;
/// The broker has no such queue or exchange.
const NOT_FOUND: u16 = 404;

/// The connections to all brokers. Cheap to clone.
#[derive(Clone)]
pub struct AmqpBrokers {
    node_id: Arc<str>,
    brokers: Arc<Mutex<HashMap<AmqpUrl, Arc<AmqpBroker>>>>,
}

/// A message to publish to an exchange.
#[derive(Debug, Clone, Copy)]
pub struct AmqpPublish<'a> {
    pub exchange: &'a str,
    pub routing_key: &'a str,
    /// Time limit from the sending to the confirmation.
    pub timeout: Duration,
}

/// Outcome of one publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AmqpPublishOutcome {
    Confirmed,
    /// The broker has no queue bound for the message.
    Returned,
    /// The broker refused the message, or did not answer in time.
    Refused(String),
    Unavailable {
        reason: String,
        after: Duration,
    },
}

struct AmqpBroker {
    url: AmqpUrl,
    node_id: Arc<str>,
    link: AsyncMutex<BrokerLink>,
    used: Mutex<Instant>,
}

enum BrokerLink {
    Unused,
    Failed { at: Instant, failures: u32, reason: String },
    Up(Arc<LiveConnection>),
}

/// An open connection.
struct LiveConnection {
    connection: Connection,
    /// Open channels without a message under way.
    idle: Mutex<Vec<Channel>>,
    /// Permits for messages under way.
    permits: Semaphore,
}

impl AmqpBrokers {
    /// Creates the pool; the names of its connections at the broker include the node's id.
    pub fn new(node_id: &Arc<str>) -> Self {
        Self { node_id: Arc::clone(node_id), brokers: Arc::default() }
    }

    /// Makes one attempt for a target of the directory. With an open connection it ends within the target's `timeout`.
    pub async fn send(&self, target: &AmqpTarget, delivery: &TargetDelivery) -> DeliveryOutcome {
        let values = TemplateValues {
            account_id: &delivery.account_id,
            channel: &delivery.channel,
            source: delivery.source,
        };
        let (exchange, routing_key) = (target.exchange.fill(values), target.routing_key.fill(values));
        let publish = AmqpPublish { exchange: &exchange, routing_key: &routing_key, timeout: target.timeout };
        match self.publish(&target.url, publish, delivery).await {
            AmqpPublishOutcome::Confirmed => DeliveryOutcome::Delivered,
            AmqpPublishOutcome::Returned => {
                DeliveryOutcome::retry("the broker has no queue for the routing key")
            }
            AmqpPublishOutcome::Refused(reason) => DeliveryOutcome::retry(reason),
            AmqpPublishOutcome::Unavailable { reason, after } => {
                DeliveryOutcome::Unavailable { reason, after }
            }
        }
    }

    /// Publishes the envelope as a persistent message and waits for its confirmation.
    pub async fn publish(
        &self,
        url: &AmqpUrl,
        publish: AmqpPublish<'_>,
        delivery: &TargetDelivery,
    ) -> AmqpPublishOutcome {
        self.broker(url).publish(publish, delivery).await
    }

    /// Counts the waiting messages of a queue and its consumers; `None` if the queue does not exist.
    ///
    /// # Errors
    /// The broker is unreachable, or refuses.
    pub async fn count(&self, url: &AmqpUrl, queue: &str) -> Result<Option<(u64, u64)>, String> {
        let broker = self.broker(url);
        let counted = async {
            let live = broker.live().await.map_err(|(reason, _)| reason)?;
            if live.connection.status().blocked() {
                return Err(IS_BLOCKED.to_owned());
            }
            // A channel of its own, since a missing queue closes it.
            let channel = live.connection.create_channel().await.map_err(|error| reason(&error))?;
            let queue = ShortString::try_new(queue).map_err(|_| "the name is too long".to_owned())?;
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let found = channel.queue_declare(queue, passive, FieldTable::default()).await;
            match found {
                Ok(found) => Ok(Some((found.message_count().into(), found.consumer_count().into()))),
                Err(error) if is_not_found(&error) => Ok(None),
                Err(error) => Err(reason(&error)),
            }
        };
        timeout(CONNECT, counted).await.unwrap_or_else(|_| Err("it did not answer in time".to_owned()))
    }

    fn broker(&self, url: &AmqpUrl) -> Arc<AmqpBroker> {
        let now = Instant::now();
        let mut brokers = self.brokers.lock();
        if let Some(broker) = brokers.get(url) {
            *broker.used.lock() = now;
            return Arc::clone(broker);
        }
        brokers.retain(|_, broker| now.saturating_duration_since(*broker.used.lock()) < UNUSED);
        let broker = Arc::new(AmqpBroker {
            url: url.clone(),
            node_id: Arc::clone(&self.node_id),
            link: AsyncMutex::new(BrokerLink::Unused),
            used: Mutex::new(now),
        });
        brokers.insert(url.clone(), Arc::clone(&broker));
        broker
    }
}

impl AmqpBroker {
    async fn publish(&self, publish: AmqpPublish<'_>, delivery: &TargetDelivery) -> AmqpPublishOutcome {
        let live = match self.live().await {
            Ok(live) => live,
            Err((reason, after)) => return AmqpPublishOutcome::Unavailable { reason, after },
        };
        if live.connection.status().blocked() {
            return AmqpPublishOutcome::Unavailable { reason: IS_BLOCKED.to_owned(), after: BLOCKED };
        }
        match timeout(publish.timeout, live.publish(publish, delivery)).await {
            Ok(Ok(published)) => published,
            Ok(Err(error)) if live.connection.status().connected() => AmqpPublishOutcome::Refused(error),
            Ok(Err(reason)) => AmqpPublishOutcome::Unavailable { reason, after: RECONNECT },
            // The channel is closed, so a late confirmation affects no other message.
            Err(_) => AmqpPublishOutcome::Refused(format!(
                "no confirmation within {} ms",
                publish.timeout.as_millis()
            )),
        }
    }

    /// Returns the open connection; else the reason why there is none, and the time to wait.
    async fn live(&self) -> Result<Arc<LiveConnection>, (String, Duration)> {
        let mut link = self.link.lock().await;
        let failures = match &*link {
            BrokerLink::Up(live) if live.connection.status().connected() => return Ok(Arc::clone(live)),
            BrokerLink::Failed { at, failures, reason } => {
                let left = wait(*failures).saturating_sub(at.elapsed());
                if !left.is_zero() {
                    return Err((reason.clone(), left));
                }
                *failures
            }
            BrokerLink::Up(_) | BrokerLink::Unused => 0,
        };
        match self.connect().await {
            Ok(live) => {
                let live = Arc::new(live);
                *link = BrokerLink::Up(Arc::clone(&live));
                Ok(live)
            }
            Err(reason) => {
                let failures = failures.saturating_add(1);
                *link = BrokerLink::Failed { at: Instant::now(), failures, reason: reason.clone() };
                Err((reason, wait(failures)))
            }
        }
    }

    async fn connect(&self) -> Result<LiveConnection, String> {
        let name = format!("fanfare {}", self.node_id);
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let mut uri: AMQPUri = self.url.expose().parse()?;
        uri.query.heartbeat = Some(uri.query.heartbeat.map_or(HEARTBEAT_S, |given| given.min(HEARTBEAT_S)));
        let runtime = default_runtime().map_err(|error| reason(&error))?;
        // A second handle of the socket: only closing it ends the wait for a silent broker.
        let socket: Arc<Mutex<Option<TcpStream>>> = Arc::default();
        let opened = Arc::clone(&socket);
        let open = async move |uri: AMQPUri, runtime: TokioRuntime| {
            let host = uri.authority.host.clone();
            let address = runtime.to_socket_addrs((host.clone(), uri.authority.port));
            let stream = AsyncTcpStream::connect(&runtime, address).await?;
            if let AsyncTcpStream::Plain(plain) = &stream {
                *opened.lock() = Some(plain.get_ref().as_fd().try_clone_to_owned()?.into());
            }
            Ok(match uri.scheme {
                AMQPScheme::AMQP => stream,
                AMQPScheme::AMQPS => stream.into_tls(&host, TLSConfig::default()).await?,
            })
        };
        let connected = timeout(CONNECT, Connection::connector(uri, runtime, open, properties)).await;
        let socket = socket.lock().take();
        match connected {
            Ok(Ok(connection)) => Ok(LiveConnection::new(connection)),
            Ok(Err(error)) => Err(format!("cannot connect to {}: {}", self.url, reason(&error))),
            Err(_) => {
                if let Some(socket) = socket {
                    // Fails only if the socket is closed already.
                    socket.shutdown(Shutdown::Both).ok();
                }
                Err(format!("cannot connect to {}: no answer in time", self.url))
            }
        }
    }
}

impl LiveConnection {
    fn new(connection: Connection) -> Self {
        let allowed = match connection.configuration().channel_max() {
            0 => u16::MAX,
            allowed => allowed,
        };
        let channels = allowed.saturating_sub(CHANNELS_APART).clamp(1, CHANNELS_MAX);
        Self { connection, idle: Mutex::default(), permits: Semaphore::new(channels.into()) }
    }

    async fn publish(
        &self,
        publish: AmqpPublish<'_>,
        delivery: &TargetDelivery,
    ) -> Result<AmqpPublishOutcome, String> {
        let [exchange, routing_key] = [publish.exchange, publish.routing_key].map(ShortString::try_new);
        let (Ok(exchange), Ok(routing_key)) = (exchange, routing_key) else {
            return Ok(AmqpPublishOutcome::Refused("the exchange or the routing key is too long".to_owned()));
        };
        let _place = self.permits.acquire().await.map_err(|error| error.to_string())?;
        let channel = self.channel().await?;
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let sent =
            channel.basic_publish(exchange, routing_key, options, &delivery.body, properties(delivery));
        let confirmation = sent.await.map_err(|error| reason(&error))?.await;
        let confirmation = confirmation.map_err(|error| reason(&error))?;
        // Only now: a channel whose message is not settled is never reused.
        self.idle.lock().push(channel);
        Ok(match confirmation {
            Confirmation::Ack(None) => AmqpPublishOutcome::Confirmed,
            Confirmation::Ack(Some(_)) => AmqpPublishOutcome::Returned,
            Confirmation::Nack(_) => {
                AmqpPublishOutcome::Refused("the broker did not take the message (nack)".to_owned())
            }
            Confirmation::NotRequested => {
                AmqpPublishOutcome::Refused("the broker confirms nothing".to_owned())
            }
        })
    }

    async fn channel(&self) -> Result<Channel, String> {
        loop {
            let Some(channel) = self.idle.lock().pop() else { break };
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let channel = self.connection.create_channel().await.map_err(|error| reason(&error))?;
        let confirms = channel.confirm_select(ConfirmSelectOptions::default()).await;
        confirms.map_err(|error| reason(&error))?;
        Ok(channel)
    }
}

/// Properties of the message, the same on every retry except for the trace.
fn properties(delivery: &TargetDelivery) -> BasicProperties {
    let mut table = FieldTable::default();
    for (name, value) in [
        (headers::ACCOUNT_ID, delivery.account_id.as_str()),
        (headers::CHANNEL, &encode_channel(&delivery.channel)),
        (headers::SOURCE, delivery.source),
        (headers::EVENT_ID, &delivery.event_id),
        (headers::RULE_ID, &delivery.rule_id),
    ] {
        table.insert(name.into(), AMQPValue::LongString(value.into()));
    }
    if let Some(trace) = &delivery.trace {
        table.insert(TRACEPARENT.into(), AMQPValue::LongString(trace.parent().into()));
        if !trace.state.is_empty() {
            table.insert(TRACESTATE.into(), AMQPValue::LongString((*trace.state).into()));
        }
    }
    let properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_delivery_mode(PERSISTENT)
        .with_app_id("fanfare".into())
        .with_type(delivery.source.into())
        .with_headers(table);
    match ShortString::try_new(&*delivery.event_id) {
        Ok(id) => properties.with_message_id(id),
        Err(_) => properties,
    }
}

fn wait(failures: u32) -> Duration {
    RECONNECT.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1))).min(RECONNECT_MAX)
}

fn is_not_found(error: &lapin::Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(error) if error.get_id() == NOT_FOUND)
}

/// Describes the error in the broker's words, which hold no credential.
fn reason(error: &lapin::Error) -> String {
    let text = error.to_string();
    text.chars().filter(|character| !character.is_control()).take(REASON_CHARACTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traced_message_has_its_span_among_the_headers() {
        const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let delivery = |state| TargetDelivery {
            account_id: crate::model::AccountId::new("acme"),
            channel: "room".into(),
            source: "channel.message",
            event_id: "e1".into(),
            rule_id: "i".into(),
            body: (&b"{}"[..]).into(),
            trace: fanfare_proto::trace::TraceContext::parse(PARENT, state).map(Box::new),
        };
        let text = |state, name: &str| {
            let properties = properties(&delivery(state));
            let headers = properties.headers().as_ref().expect("there are some").inner().clone();
            headers.get(name).map(|value| match value {
                AMQPValue::LongString(text) => text.to_string(),
                other => panic!("a text is expected: {other:?}"),
            })
        };
        assert_eq!(text("a=1", TRACEPARENT).as_deref(), Some(PARENT));
        assert_eq!(text("a=1", TRACESTATE).as_deref(), Some("a=1"));
        assert_eq!(text("", TRACESTATE), None);
        assert_eq!(text("", headers::EVENT_ID).as_deref(), Some("e1"));
    }
}
