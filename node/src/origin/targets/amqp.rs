//! Publishes to AMQP brokers: one connection for each address, and a channel for each message that is under way.
//!
//! A message counts as delivered when the broker has confirmed it. A channel carries one message at a time, so that a confirmation or
//! a return is that message's, and so that an error of the broker, which ends the channel, is that message's alone. A broker that
//! cannot be reached, or that blocks publishers, is unavailable for all targets there, and is connected to again after a growing wait.

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

use super::{Delivery, Outcome};
use crate::accounts::{AmqpTarget, TemplateValues};
use crate::model::AmqpUrl;

/// For the connection and its handshakes.
const CONNECT: Duration = Duration::from_secs(5);
/// A broker that is silent for twice as long is gone.
const HEARTBEAT_S: u16 = 10;
/// Messages under way at one broker, as far as it allows so many channels.
const CHANNELS_MAX: u16 = 1_024;
/// Channels beside those of messages.
const CHANNELS_APART: u16 = 8;
/// The wait after a first failure to connect; doubled with each further one.
const RECONNECT: Duration = Duration::from_millis(500);
const RECONNECT_MAX: Duration = Duration::from_secs(10);
/// A broker that blocks publishers is asked again after this time.
const BLOCKED: Duration = Duration::from_secs(1);
/// Connections that served nothing for so long are closed when another one is opened.
const UNUSED: Duration = Duration::from_secs(60);
const IS_BLOCKED: &str = "the broker blocks publishers (connection.blocked)";
const REASON_CHARACTERS: usize = 200;
const PERSISTENT: u8 = 2;
/// The broker has no such queue or exchange.
const NOT_FOUND: u16 = 404;

/// The connections to all brokers. Cheap to clone.
#[derive(Clone)]
pub struct Brokers {
    node_id: Arc<str>,
    brokers: Arc<Mutex<HashMap<AmqpUrl, Arc<Broker>>>>,
}

/// A message on its way to an exchange.
#[derive(Debug, Clone, Copy)]
pub struct Publish<'a> {
    pub exchange: &'a str,
    pub routing_key: &'a str,
    /// From the sending to the confirmation.
    pub timeout: Duration,
}

/// The end of one publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Published {
    Confirmed,
    /// No queue is bound for it.
    Returned,
    /// The broker did not take it, or has not answered in time.
    Refused(String),
    Unavailable {
        reason: String,
        after: Duration,
    },
}

struct Broker {
    url: AmqpUrl,
    node_id: Arc<str>,
    link: AsyncMutex<Link>,
    used: Mutex<Instant>,
}

enum Link {
    Unused,
    Failed { at: Instant, failures: u32, reason: String },
    Up(Arc<Live>),
}

/// An open connection.
struct Live {
    connection: Connection,
    /// Open channels without a message under way.
    idle: Mutex<Vec<Channel>>,
    /// For messages under way.
    places: Semaphore,
}

impl Brokers {
    /// The node's id stands in the names of its connections at the broker.
    pub fn new(node_id: &Arc<str>) -> Self {
        Self { node_id: Arc::clone(node_id), brokers: Arc::default() }
    }

    /// Makes one attempt for a target of the directory. Behind an open connection it is over within the target's `timeout`.
    pub async fn send(&self, target: &AmqpTarget, delivery: &Delivery) -> Outcome {
        let values = TemplateValues {
            account_id: &delivery.account_id,
            channel: &delivery.channel,
            source: delivery.source,
        };
        let (exchange, routing_key) = (target.exchange.fill(values), target.routing_key.fill(values));
        let publish = Publish { exchange: &exchange, routing_key: &routing_key, timeout: target.timeout };
        match self.publish(&target.url, publish, delivery).await {
            Published::Confirmed => Outcome::Delivered,
            Published::Returned => Outcome::retry("the broker has no queue for the routing key"),
            Published::Refused(reason) => Outcome::retry(reason),
            Published::Unavailable { reason, after } => Outcome::Unavailable { reason, after },
        }
    }

    /// Publishes the envelope as a persistent message and waits for its confirmation.
    pub async fn publish(&self, url: &AmqpUrl, publish: Publish<'_>, delivery: &Delivery) -> Published {
        self.broker(url).publish(publish, delivery).await
    }

    /// Messages that wait in a queue of the broker, and its consumers; none: there is no such queue.
    ///
    /// # Errors
    /// The broker cannot be reached, or refuses.
    pub async fn count(&self, url: &AmqpUrl, queue: &str) -> Result<Option<(u64, u64)>, String> {
        let broker = self.broker(url);
        let counted = async {
            let live = broker.live().await.map_err(|(reason, _)| reason)?;
            if live.connection.status().blocked() {
                return Err(IS_BLOCKED.to_owned());
            }
            // Of its own, since a queue that is missing ends it.
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

    fn broker(&self, url: &AmqpUrl) -> Arc<Broker> {
        let now = Instant::now();
        let mut brokers = self.brokers.lock();
        if let Some(broker) = brokers.get(url) {
            *broker.used.lock() = now;
            return Arc::clone(broker);
        }
        brokers.retain(|_, broker| now.saturating_duration_since(*broker.used.lock()) < UNUSED);
        let broker = Arc::new(Broker {
            url: url.clone(),
            node_id: Arc::clone(&self.node_id),
            link: AsyncMutex::new(Link::Unused),
            used: Mutex::new(now),
        });
        brokers.insert(url.clone(), Arc::clone(&broker));
        broker
    }
}

impl Broker {
    async fn publish(&self, publish: Publish<'_>, delivery: &Delivery) -> Published {
        let live = match self.live().await {
            Ok(live) => live,
            Err((reason, after)) => return Published::Unavailable { reason, after },
        };
        if live.connection.status().blocked() {
            return Published::Unavailable { reason: IS_BLOCKED.to_owned(), after: BLOCKED };
        }
        match timeout(publish.timeout, live.publish(publish, delivery)).await {
            Ok(Ok(published)) => published,
            Ok(Err(error)) if live.connection.status().connected() => Published::Refused(error),
            Ok(Err(reason)) => Published::Unavailable { reason, after: RECONNECT },
            // Its channel is closed, so that a late confirmation is nobody's.
            Err(_) => {
                Published::Refused(format!("no confirmation within {} ms", publish.timeout.as_millis()))
            }
        }
    }

    /// The open connection; else why there is none, and when to ask again.
    async fn live(&self) -> Result<Arc<Live>, (String, Duration)> {
        let mut link = self.link.lock().await;
        let failures = match &*link {
            Link::Up(live) if live.connection.status().connected() => return Ok(Arc::clone(live)),
            Link::Failed { at, failures, reason } => {
                let left = wait(*failures).saturating_sub(at.elapsed());
                if !left.is_zero() {
                    return Err((reason.clone(), left));
                }
                *failures
            }
            Link::Up(_) | Link::Unused => 0,
        };
        match self.connect().await {
            Ok(live) => {
                let live = Arc::new(live);
                *link = Link::Up(Arc::clone(&live));
                Ok(live)
            }
            Err(reason) => {
                let failures = failures.saturating_add(1);
                *link = Link::Failed { at: Instant::now(), failures, reason: reason.clone() };
                Err((reason, wait(failures)))
            }
        }
    }

    async fn connect(&self) -> Result<Live, String> {
        let name = format!("fanfare {}", self.node_id);
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        let mut uri: AMQPUri = self.url.expose().parse()?;
        uri.query.heartbeat = Some(uri.query.heartbeat.map_or(HEARTBEAT_S, |given| given.min(HEARTBEAT_S)));
        let runtime = default_runtime().map_err(|error| reason(&error))?;
        // A second handle of the socket: what waits for a broker that says nothing ends only with it.
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
            Ok(Ok(connection)) => Ok(Live::new(connection)),
            Ok(Err(error)) => Err(format!("cannot connect to {}: {}", self.url, reason(&error))),
            Err(_) => {
                if let Some(socket) = socket {
                    // One that is closed already needs no end.
                    socket.shutdown(Shutdown::Both).ok();
                }
                Err(format!("cannot connect to {}: no answer in time", self.url))
            }
        }
    }
}

impl Live {
    fn new(connection: Connection) -> Self {
        let allowed = match connection.configuration().channel_max() {
            0 => u16::MAX,
            allowed => allowed,
        };
        let places = allowed.saturating_sub(CHANNELS_APART).clamp(1, CHANNELS_MAX);
        Self { connection, idle: Mutex::default(), places: Semaphore::new(places.into()) }
    }

    async fn publish(&self, publish: Publish<'_>, delivery: &Delivery) -> Result<Published, String> {
        let [exchange, routing_key] = [publish.exchange, publish.routing_key].map(ShortString::try_new);
        let (Ok(exchange), Ok(routing_key)) = (exchange, routing_key) else {
            return Ok(Published::Refused("the exchange or the routing key is too long".to_owned()));
        };
        let _place = self.places.acquire().await.map_err(|error| error.to_string())?;
        let channel = self.channel().await?;
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let sent =
            channel.basic_publish(exchange, routing_key, options, &delivery.body, properties(delivery));
        let confirmation = sent.await.map_err(|error| reason(&error))?.await;
        let confirmation = confirmation.map_err(|error| reason(&error))?;
        // Only now: one whose message is not settled is never used again.
        self.idle.lock().push(channel);
        Ok(match confirmation {
            Confirmation::Ack(None) => Published::Confirmed,
            Confirmation::Ack(Some(_)) => Published::Returned,
            Confirmation::Nack(_) => {
                Published::Refused("the broker did not take the message (nack)".to_owned())
            }
            Confirmation::NotRequested => Published::Refused("the broker confirms nothing".to_owned()),
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

/// The same on every retry, but for the trace.
fn properties(delivery: &Delivery) -> BasicProperties {
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

/// The broker's text, which holds no credential.
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
        let delivery = |state| Delivery {
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
