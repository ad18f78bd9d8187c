use std::fmt;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;

use super::super::admin::Admin;
use super::super::machine::first_line;
use super::super::server::Server;
use super::servers;
use crate::Result;
use crate::wire::dialect::Dialect;

const WINDOW: &str = "FANFARE_LIMITS_DELIVERY_WINDOW_MS";
const THREADS: &str = "FANFARE_THREADS";

/// A measured server, with its settings and its protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Contender {
    #[value(name = "floor")]
    #[serde(rename = "floor")]
    Baseline,
    #[value(name = "floor-window")]
    #[serde(rename = "floor-window")]
    BaselineWindow,
    #[value(name = "floor-io-uring")]
    #[serde(rename = "floor-io-uring")]
    BaselineIoUring,
    #[value(name = "floor-window-io-uring")]
    #[serde(rename = "floor-window-io-uring")]
    BaselineWindowIoUring,
    #[value(name = "floor-two-threads")]
    #[serde(rename = "floor-two-threads")]
    BaselineTwoThreads,
    Fanfare,
    #[value(name = "fanfare-window-0")]
    #[serde(rename = "fanfare-window-0")]
    FanfareWindow0,
    #[value(name = "fanfare-window-2")]
    #[serde(rename = "fanfare-window-2")]
    FanfareWindow2,
    #[value(name = "fanfare-window-3")]
    #[serde(rename = "fanfare-window-3")]
    FanfareWindow3,
    #[value(name = "fanfare-window-5")]
    #[serde(rename = "fanfare-window-5")]
    FanfareWindow5,
    #[value(name = "fanfare-window-8")]
    #[serde(rename = "fanfare-window-8")]
    FanfareWindow8,
    FanfareOneThread,
    CentrifugeJson,
    CentrifugeJsonBatching,
    CentrifugeProtobuf,
    CentrifugeProtobufBatching,
    Nats,
    Sockudo,
}

/// Paths of the binaries, and a folder for what the servers write.
pub(super) struct ServerPaths {
    pub(super) bench: PathBuf,
    pub(super) node: PathBuf,
    pub(super) peers: PathBuf,
    pub(super) data: PathBuf,
}

#[derive(Serialize)]
pub(super) struct ServerDescription {
    name: &'static str,
    version: String,
    settings: String,
}

impl Contender {
    /// Gives the contenders that were named, or those of the published tables: the baseline that the bars refer to, the
    /// baseline with io_uring in one thread and in two, the node with the windows of the table, and all peers.
    pub(super) fn chosen(named: &[Self]) -> Vec<Self> {
        let all = Self::value_variants().iter().copied();
        let is_asked = |contender: &Self| match named {
            [] => !matches!(
                contender,
                Self::BaselineWindow
                    | Self::BaselineIoUring
                    | Self::FanfareWindow2
                    | Self::FanfareWindow3
                    | Self::FanfareWindow8
            ),
            _ => named.contains(contender),
        };
        all.filter(is_asked).collect()
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Baseline => "floor",
            Self::BaselineWindow => "floor, 1 ms window",
            Self::BaselineIoUring => "floor, io_uring",
            Self::BaselineWindowIoUring => "floor, io_uring, 1 ms window",
            Self::BaselineTwoThreads => "floor, io_uring, 1 ms window, two threads",
            Self::Fanfare => "Fanfare",
            Self::FanfareWindow0 => "Fanfare, no window",
            Self::FanfareWindow2 => "Fanfare, 2 ms window",
            Self::FanfareWindow3 => "Fanfare, 3 ms window",
            Self::FanfareWindow5 => "Fanfare, 5 ms window",
            Self::FanfareWindow8 => "Fanfare, 8 ms window",
            Self::FanfareOneThread => "Fanfare, one thread",
            Self::CentrifugeJson => "centrifuge, JSON",
            Self::CentrifugeJsonBatching => "centrifuge, JSON, 5 ms batching",
            Self::CentrifugeProtobuf => "centrifuge, Protobuf",
            Self::CentrifugeProtobufBatching => "centrifuge, Protobuf, 5 ms batching",
            Self::Nats => "NATS",
            Self::Sockudo => "Sockudo",
        }
    }

    /// Whether it is Fanfare, so that a fault of it is an error.
    pub(super) fn is_fanfare(self) -> bool {
        self == Self::Fanfare || self.setting().is_some()
    }

    /// Gives the one setting that differs from the default, as variable and value.
    fn setting(self) -> Option<(&'static str, u32)> {
        match self {
            Self::FanfareWindow0 => Some((WINDOW, 0)),
            Self::FanfareWindow2 => Some((WINDOW, 2)),
            Self::FanfareWindow3 => Some((WINDOW, 3)),
            Self::FanfareWindow5 => Some((WINDOW, 5)),
            Self::FanfareWindow8 => Some((WINDOW, 8)),
            Self::FanfareOneThread => Some((THREADS, 1)),
            _ => None,
        }
    }

    pub(super) fn is_peer(self) -> bool {
        self.dialect() != Dialect::Fanfare
    }

    pub(super) fn is_plain_peer(self) -> bool {
        self.is_peer() && self.is_plain()
    }

    pub(super) fn is_batching_peer(self) -> bool {
        self.is_peer() && !self.is_plain()
    }

    /// Whether it has no batching, and so a row in tables without deliveries, where batching makes no difference.
    pub(super) fn is_plain(self) -> bool {
        matches!(
            self,
            Self::Baseline
                | Self::Fanfare
                | Self::CentrifugeJson
                | Self::CentrifugeProtobuf
                | Self::Nats
                | Self::Sockudo
        )
    }

    pub(super) fn dialect(self) -> Dialect {
        match self {
            Self::CentrifugeJson | Self::CentrifugeJsonBatching => Dialect::CentrifugeJson,
            Self::CentrifugeProtobuf | Self::CentrifugeProtobufBatching => Dialect::CentrifugeProtobuf,
            Self::Nats => Dialect::Nats,
            Self::Sockudo => Dialect::Pusher,
            _ => Dialect::Fanfare,
        }
    }

    /// Path of a peer's binary, below the folder of all peers.
    pub(super) fn peer(self) -> Option<&'static str> {
        match self {
            Self::CentrifugeJson
            | Self::CentrifugeProtobuf
            | Self::CentrifugeJsonBatching
            | Self::CentrifugeProtobufBatching => Some("centrifuge"),
            Self::Nats => Some("nats-server"),
            Self::Sockudo => Some("bin/sockudo"),
            _ => None,
        }
    }

    /// Gives the binary to run, unless it is this program.
    fn binary(self, places: &ServerPaths) -> PathBuf {
        self.peer().map_or_else(|| places.node.clone(), |peer| places.peers.join(peer))
    }

    pub(super) fn start(self, places: &ServerPaths) -> Result<Server> {
        let binary = self.binary(places);
        match self {
            Self::Baseline => Server::baseline(&places.bench, 0),
            Self::BaselineWindow => Server::baseline(&places.bench, 1),
            Self::BaselineIoUring => Server::baseline_io_uring(&places.bench, 0, 1),
            Self::BaselineWindowIoUring => Server::baseline_io_uring(&places.bench, 1, 1),
            Self::BaselineTwoThreads => Server::baseline_io_uring(&places.bench, 1, 2),
            Self::CentrifugeJson | Self::CentrifugeProtobuf => servers::centrifuge(&binary, false),
            Self::CentrifugeJsonBatching | Self::CentrifugeProtobufBatching => {
                servers::centrifuge(&binary, true)
            }
            Self::Nats => servers::nats(&binary, &places.data),
            Self::Sockudo => servers::sockudo(&binary, &places.data),
            _ => Server::node(&places.node, &places.data, "none", self.setting()),
        }
    }

    /// Starts the server with heartbeats. All but the baseline have heartbeats anyway.
    pub(super) fn start_with_heartbeats(self, places: &ServerPaths) -> Result<Server> {
        match self {
            Self::Baseline => Server::baseline_with_heartbeats(&places.bench),
            _ => self.start(places),
        }
    }

    pub(super) fn describe(self, places: &ServerPaths) -> ServerDescription {
        let ask = |argument: &str| first_line(&self.binary(places).to_string_lossy(), &[argument]);
        let bench = of_this();
        let (version, settings) = match self {
            Self::Baseline => (bench, "one thread, each frame written at once"),
            Self::BaselineWindow => (bench, "one thread, what is published within 1 ms written together"),
            Self::BaselineIoUring => (bench, "as floor, all subscribers written to with one call"),
            Self::BaselineWindowIoUring => {
                (bench, "as floor, 1 ms window, all subscribers written to with one call")
            }
            Self::BaselineTwoThreads => {
                (bench, "as floor, 1 ms window, all subscribers of a thread written to with one call")
            }
            Self::Fanfare => (
                format!("{}, {}", ask("--version"), io_uring(places)),
                "default settings with authentication, store none (of durable publishes embedded), \
                 limits.publishes_per_second 0, limits.connections 18000",
            ),
            Self::CentrifugeJson | Self::CentrifugeProtobuf => {
                (ask("-version"), "GOGC=200, UseWriteBufferPool, ReadBufferSize 1024")
            }
            Self::CentrifugeJsonBatching | Self::CentrifugeProtobufBatching => (
                ask("-version"),
                "GOGC=200, UseWriteBufferPool, ReadBufferSize 1024, WriteDelay 5ms, MaxMessagesInFrame -1, \
                 ReplyWithoutQueue",
            ),
            Self::Nats => (
                ask("--version").replace(": ", " "),
                "WebSocket listener, no TLS, no compression, else defaults",
            ),
            Self::Sockudo => (
                ask("--version"),
                "client events on private channels, rate_limiter and metrics off, max_connections 100000, \
                 max_client_events_per_second 0, else defaults",
            ),
            _ => (ask("--version"), "as Fanfare"),
        };
        let settings = match self.setting() {
            Some((variable, value)) => format!("{settings}, {variable}={value}"),
            None => settings.to_owned(),
        };
        ServerDescription { name: self.name(), version, settings }
    }
}

impl ServerDescription {
    /// Describes the bare store loop, which is no server but has a row.
    pub(super) fn bare_loop() -> Self {
        let settings = "embedded store without a node, rows made in one thread and committed in another, tables and sealing as the node has them, a batch and an fsync for each group";
        Self { name: "bare store loop", version: of_this(), settings: settings.to_owned() }
    }
}

fn of_this() -> String {
    concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// Tells whether the node uses io_uring. Without it a delivery costs more.
fn io_uring(places: &ServerPaths) -> String {
    let node = Contender::Fanfare.start(places);
    let threads = node.and_then(|node| Admin::of(&node)?.metric("fanfare_io_uring_shards"));
    match threads {
        Ok(threads) => format!("io_uring in {threads} threads"),
        Err(error) => format!("io_uring not known: {error}"),
    }
}

impl fmt::Display for ServerDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, version, settings } = self;
        write!(f, "server   {name}: {version}; {settings}")
    }
}
