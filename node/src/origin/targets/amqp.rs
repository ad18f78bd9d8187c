//! Publishes to AMQP brokers: one connection for each address, on which each target has a channel of its own.
//!
//! A message counts as delivered when the broker has confirmed it. A broker that cannot be reached, or that blocks publishers, is
//! unavailable for all targets there, and is connected to again after a growing wait.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::path::encode_channel;
use fanfare_proto::webhook as headers;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, timeout};

use super::{Delivery, Outcome};
use crate::accounts::{AmqpTarget, TemplateValues};
use crate::model::AmqpUrl;

const CONNECT: Duration = Duration::from_secs(10);
/// The wait after a first failure to connect; doubled with each further one.
const RECONNECT: Duration = Duration::from_millis(500);
const RECONNECT_MAX: Duration = Duration::from_secs(10);
/// A broker that blocks publishers is asked again after this time.
const BLOCKED: Duration = Duration::from_secs(1);
/// Connections that served nothing for so long are closed when another one is opened.
const UNUSED: Duration = Duration::from_secs(60);
const REASON_CHARACTERS: usize = 200;
const PERSISTENT: u8 = 2;

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
    /// Whoever publishes under one name shares a channel: an error of the broker there ends what is under way on it.
    pub channel_of: &'a str,
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
    channels: AsyncMutex<HashMap<Box<str>, Channel>>,
}

impl Brokers {
    /// The node's id stands in the names of its connections at the broker.
    pub fn new(node_id: &Arc<str>) -> Self {
        Self { node_id: Arc::clone(node_id), brokers: Arc::default() }
    }

    /// Makes one attempt for a target of the directory, which is over within the target's `timeout`.
    pub async fn send(&self, target: &AmqpTarget, delivery: &Delivery) -> Outcome {
        let values = TemplateValues {
            account_id: &delivery.account_id,
            channel: &delivery.channel,
            source: delivery.source,
        };
        let (exchange, routing_key) = (target.exchange.fill(values), target.routing_key.fill(values));
        let channel_of = format!("{}/{}", delivery.account_id, delivery.rule_id);
        let publish = Publish {
            exchange: &exchange,
            routing_key: &routing_key,
            channel_of: &channel_of,
            timeout: target.timeout,
        };
        match self.publish(&target.url, publish, delivery).await {
            Published::Confirmed => Outcome::Delivered,
            Published::Returned => Outcome::retry("the broker has no queue for the routing key"),
            Published::Refused(reason) => Outcome::retry(reason),
            Published::Unavailable { reason, after } => Outcome::Unavailable { reason, after },
        }
    }

    /// Publishes the envelope as a persistent message and waits for its confirmation.
    pub async fn publish(&self, url: &AmqpUrl, publish: Publish<'_>, delivery: &Delivery) -> Published {
        let broker = self.broker(url);
        let published = timeout(publish.timeout, broker.publish(publish, delivery)).await;
        match published {
            Ok(published) => published,
            Err(_) => {
                // What it has under way would stay in memory for as long as the channel is open.
                broker.forget_channel(publish.channel_of).await;
                Published::Refused(format!("no confirmation within {} ms", publish.timeout.as_millis()))
            }
        }
    }

    /// Messages that wait in a queue of the broker, and its consumers.
    ///
    /// # Errors
    /// The broker cannot be reached, or has no such queue.
    pub async fn count(&self, url: &AmqpUrl, queue: &str) -> Result<(u64, u64), String> {
        let broker = self.broker(url);
        let counted = async {
            let live = broker.live().await.map_err(|(reason, _)| reason)?;
            // Of its own, since a queue that is missing ends it.
            let channel = live.connection.create_channel().await.map_err(|error| reason(&error))?;
            let queue = ShortString::try_new(queue).map_err(|_| "the name is too long".to_owned())?;
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let found = channel.queue_declare(queue, passive, FieldTable::default()).await;
            let counts = found.map(|found| (found.message_count().into(), found.consumer_count().into()));
            counts.map_err(|error| reason(&error))
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
            let reason = "the broker blocks publishers (connection.blocked)".to_owned();
            return Published::Unavailable { reason, after: BLOCKED };
        }
        let published = live.publish(publish, delivery).await;
        match published {
            Ok(published) => published,
            Err(error) if live.connection.status().connected() => {
                live.channels.lock().await.remove(publish.channel_of);
                Published::Refused(error)
            }
            Err(reason) => Published::Unavailable { reason, after: RECONNECT },
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
        let connected = timeout(CONNECT, Connection::connect(&self.url.expose(), properties)).await;
        match connected {
            Ok(Ok(connection)) => Ok(Live { connection, channels: AsyncMutex::default() }),
            Ok(Err(error)) => Err(format!("cannot connect to {}: {}", self.url, reason(&error))),
            Err(_) => Err(format!("cannot connect to {}: no answer in time", self.url)),
        }
    }

    async fn forget_channel(&self, of: &str) {
        let Ok(link) = self.link.try_lock() else { return };
        if let Link::Up(live) = &*link {
            live.channels.lock().await.remove(of);
        }
    }
}

impl Live {
    async fn publish(&self, publish: Publish<'_>, delivery: &Delivery) -> Result<Published, String> {
        let channel = self.channel(publish.channel_of).await?;
        let [exchange, routing_key] = [publish.exchange, publish.routing_key].map(ShortString::try_new);
        let (Ok(exchange), Ok(routing_key)) = (exchange, routing_key) else {
            return Ok(Published::Refused("the exchange or the routing key is too long".to_owned()));
        };
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let sent =
            channel.basic_publish(exchange, routing_key, options, &delivery.body, properties(delivery));
        let confirmation = sent.await.map_err(|error| reason(&error))?.await;
        Ok(match confirmation.map_err(|error| reason(&error))? {
            Confirmation::Ack(None) => Published::Confirmed,
            Confirmation::Ack(Some(_)) => Published::Returned,
            Confirmation::Nack(_) => {
                Published::Refused("the broker did not take the message (nack)".to_owned())
            }
            Confirmation::NotRequested => Published::Refused("the broker confirms nothing".to_owned()),
        })
    }

    async fn channel(&self, of: &str) -> Result<Channel, String> {
        let mut channels = self.channels.lock().await;
        if let Some(channel) = channels.get(of).filter(|channel| channel.status().connected()) {
            return Ok(channel.clone());
        }
        let channel = self.connection.create_channel().await.map_err(|error| reason(&error))?;
        let confirms = channel.confirm_select(ConfirmSelectOptions::default()).await;
        confirms.map_err(|error| reason(&error))?;
        channels.insert(of.into(), channel.clone());
        Ok(channel)
    }
}

/// The same on every retry.
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

/// The broker's text, which holds no credential.
fn reason(error: &lapin::Error) -> String {
    let text = error.to_string();
    text.chars().filter(|character| !character.is_control()).take(REASON_CHARACTERS).collect()
}
