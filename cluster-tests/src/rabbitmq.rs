//! A real RabbitMQ: one that the tests of a process share, each with a vhost of its own, or one of a test's own that it may kill.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use lapin::options::{BasicAckOptions, BasicConsumeOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties, Consumer};
use serde_json::{Value, json};

use crate::script::Script;
use crate::{NodeOptions, Response, SOON, http, wait_for};

/// User with all permissions.
const ADMIN: &str = "guest:guest";

/// A vhost of a broker.
#[derive(Clone)]
pub struct RabbitMq {
    /// URL without a vhost, ending in a slash.
    amqp: String,
    management: String,
    vhost: String,
    script: Arc<Script>,
}

impl RabbitMq {
    /// Gives a vhost of the broker of this process, which no test may disturb; `None` if it cannot be started, which
    /// `CI=true` forbids.
    pub async fn shared() -> Option<Self> {
        static STARTED: OnceLock<Option<RabbitMq>> = OnceLock::new();
        let started = tokio::task::spawn_blocking(|| STARTED.get_or_init(|| Self::start(None)).clone());
        let shared = started.await.expect("the broker was started")?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).expect("the operating system gives random bytes");
        let broker = Self { vhost: format!("t{:016x}", u64::from_be_bytes(random)), ..shared };
        let vhost = format!("/api/vhosts/{}", broker.vhost);
        assert_eq!(broker.call("PUT", &vhost, &json!({})).await.status, 201);
        let permissions = format!("/api/permissions/{}/guest", broker.vhost);
        let all = json!({"configure": ".*", "write": ".*", "read": ".*"});
        assert!(matches!(broker.call("PUT", &permissions, &all).await.status, 201 | 204));
        Some(broker)
    }

    /// Starts a broker of the test's own. It asks the backend `auth` about users that it does not know. `None` if it
    /// cannot be started, which `CI=true` forbids. Blocks.
    pub fn start(auth: Option<&str>) -> Option<Self> {
        let script = Arc::new(Script::new("rabbitmq/rabbitmq", &["end"]));
        let auth: Vec<_> = auth.into_iter().flat_map(|url| ["--auth-http", url]).collect();
        let Some(urls) = script.run(&[&["start"], &auth[..]].concat()) else {
            crate::not_run("RabbitMQ cannot be started");
            return None;
        };
        let (amqp, management) = urls.split_once(' ').expect("two addresses");
        let amqp = amqp.strip_suffix("%2f").expect("the first vhost").to_owned();
        Some(Self { amqp, management: management.to_owned(), vhost: "/".to_owned(), script })
    }

    /// Gives the URL for the user with all permissions.
    pub fn url(&self) -> String {
        self.url_as(ADMIN)
    }

    /// Gives the URL for `user:password`.
    pub fn url_as(&self, user: &str) -> String {
        let amqp = self.amqp.replacen(ADMIN, user, 1);
        format!("{amqp}{}", self.vhost.replace('/', "%2f"))
    }

    /// Gives the AMQP address.
    pub fn addr(&self) -> SocketAddr {
        let (_, host) = self.amqp.split_once('@').expect("a user");
        host.trim_end_matches('/').parse().expect("an address")
    }

    /// Gives the address of the management API, with the user that has all permissions.
    pub fn management(&self) -> &str {
        &self.management
    }

    /// Sets a node to have its queues on this broker.
    pub fn queues(&self, options: NodeOptions) -> NodeOptions {
        options
            .environment("FANFARE_AMQP_URL", &self.url())
            .environment("FANFARE_AMQP_MANAGEMENT_URL", &self.management)
    }

    /// Waits until all durable queues are in the files of the broker, which writes them a moment after its answer.
    pub async fn until_kept(&self) {
        let script = Arc::clone(&self.script);
        let synced = tokio::task::spawn_blocking(move || script.run(&["sync"]));
        assert!(synced.await.expect("the script was run").is_some(), "the broker writes its files");
    }

    /// Sends a signal to the broker.
    pub fn signal(&self, signal: &str) {
        assert!(self.script.run(&["signal", signal]).is_some(), "the broker takes the signal {signal}");
    }

    /// Sets whether the broker blocks publishers, as on a full disk. Blocks.
    pub fn alarm(&self, is_on: bool) {
        let state = if is_on { "on" } else { "off" };
        assert!(self.script.run(&["alarm", state]).is_some(), "the broker has its alarm {state}");
    }

    /// Restarts the broker after its end, on the same ports and data. Blocks.
    pub fn restart(&self) {
        assert!(self.script.run(&["start"]).is_some(), "the broker starts again");
    }

    /// Calls the management API.
    pub async fn call(&self, method: &str, path: &str, body: &Value) -> Response {
        let (_, rest) = self.management.split_once('@').expect("a host");
        let addr: SocketAddr = rest.parse().expect("an address");
        let authorization = http::basic(ADMIN);
        let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
        http::request(addr, method, path, &headers, body.to_string()).await
    }

    /// Connects as the user with all permissions.
    pub async fn connect(&self) -> Connection {
        let url = self.url();
        let connect = async || Connection::connect(&url, ConnectionProperties::default()).await.ok();
        wait_for(SOON, "a connection to the broker", connect).await
    }

    /// Consumes a queue as the user with all permissions.
    pub async fn consume(&self, queue: &str) -> QueueConsumer {
        QueueConsumer::from(self.connect().await, queue).await.expect("a consumer")
    }
}

/// A consumer with its connection.
pub struct QueueConsumer {
    connection: Connection,
    channel: Channel,
    consumer: Consumer,
}

/// A message that the consumer has acked.
#[derive(Debug, Clone)]
pub struct ConsumedMessage {
    pub envelope: Value,
    pub body: Vec<u8>,
    pub routing_key: String,
    pub message_id: String,
    headers: FieldTable,
}

impl ConsumedMessage {
    pub fn header(&self, name: &str) -> String {
        let value = self.headers.inner().get(name).and_then(|value| value.as_long_string());
        value.map(ToString::to_string).unwrap_or_default()
    }
}

impl QueueConsumer {
    /// Consumes a queue.
    ///
    /// # Errors
    ///
    /// Returns an error if the broker refuses it.
    pub async fn from(connection: Connection, queue: &str) -> lapin::Result<Self> {
        let channel = connection.create_channel().await?;
        let options = BasicConsumeOptions::default();
        let consumer = channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
        Ok(Self { connection, channel, consumer })
    }

    /// Gives the next message; the test fails without one.
    pub async fn next(&mut self) -> ConsumedMessage {
        let next = tokio::time::timeout(SOON, self.try_next()).await;
        next.expect("a message in time").expect("the consumer goes on")
    }

    /// Gives the next message; `None` if the broker has ended the consumer.
    pub async fn try_next(&mut self) -> Option<ConsumedMessage> {
        use futures_util::StreamExt as _;
        let delivery = self.consumer.next().await?.ok()?;
        delivery.acker.ack(BasicAckOptions::default()).await.ok()?;
        Some(ConsumedMessage {
            envelope: serde_json::from_slice(&delivery.data).expect("an envelope"),
            routing_key: delivery.routing_key.to_string(),
            message_id: delivery
                .properties
                .message_id()
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            headers: delivery.properties.headers().clone().unwrap_or_default(),
            body: delivery.data,
        })
    }

    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Whether the connection is open: neither the broker nor the network has ended it.
    pub fn is_connected(&self) -> bool {
        self.connection.status().connected()
    }
}
