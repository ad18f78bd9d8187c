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

/// A server, with how it is set and what is spoken with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Contender {
    Floor,
    FloorWindow,
    FloorIoUring,
    FloorWindowIoUring,
    FloorTwoThreads,
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

/// Where the binaries are, and a folder for what the servers write.
pub(super) struct Places {
    pub(super) bench: PathBuf,
    pub(super) node: PathBuf,
    pub(super) peers: PathBuf,
    pub(super) data: PathBuf,
}

#[derive(Serialize)]
pub(super) struct Described {
    name: &'static str,
    version: String,
    settings: String,
}

impl Contender {
    /// Those that were named, or those of the published tables: the floor that the bars are of, what a server with
    /// nothing but one call for many sockets costs, in one thread and in two, the node with the windows that the table
    /// is to have, and all peers.
    pub(super) fn chosen(named: &[Self]) -> Vec<Self> {
        let all = Self::value_variants().iter().copied();
        let is_asked = |contender: &Self| match named {
            [] => !matches!(
                contender,
                Self::FloorWindow
                    | Self::FloorIoUring
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
            Self::Floor => "floor",
            Self::FloorWindow => "floor, 1 ms window",
            Self::FloorIoUring => "floor, io_uring",
            Self::FloorWindowIoUring => "floor, io_uring, 1 ms window",
            Self::FloorTwoThreads => "floor, io_uring, 1 ms window, two threads",
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

    /// Whether a fault of it is an error.
    pub(super) fn is_fanfare(self) -> bool {
        self == Self::Fanfare || self.setting().is_some()
    }

    /// What it has otherwise than Fanfare as it comes, by its variable.
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

    /// Whether it is as it comes: what collects messages makes no difference where there are none.
    pub(super) fn is_plain(self) -> bool {
        matches!(
            self,
            Self::Floor
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

    /// The binary of a peer, in the folder of all of them.
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

    /// What is run, unless it is this program.
    fn binary(self, places: &Places) -> PathBuf {
        self.peer().map_or_else(|| places.node.clone(), |peer| places.peers.join(peer))
    }

    pub(super) fn start(self, places: &Places) -> Result<Server> {
        let binary = self.binary(places);
        match self {
            Self::Floor => Server::floor(&places.bench, 0),
            Self::FloorWindow => Server::floor(&places.bench, 1),
            Self::FloorIoUring => Server::floor_by_ring(&places.bench, 0, 1),
            Self::FloorWindowIoUring => Server::floor_by_ring(&places.bench, 1, 1),
            Self::FloorTwoThreads => Server::floor_by_ring(&places.bench, 1, 2),
            Self::CentrifugeJson | Self::CentrifugeProtobuf => servers::centrifuge(&binary, false),
            Self::CentrifugeJsonBatching | Self::CentrifugeProtobufBatching => {
                servers::centrifuge(&binary, true)
            }
            Self::Nats => servers::nats(&binary, &places.data),
            Self::Sockudo => servers::sockudo(&binary, &places.data),
            _ => Server::node(&places.node, &places.data, "none", self.setting()),
        }
    }

    /// All others have heartbeats anyway.
    pub(super) fn start_with_heartbeats(self, places: &Places) -> Result<Server> {
        match self {
            Self::Floor => Server::floor_with_heartbeats(&places.bench),
            _ => self.start(places),
        }
    }

    pub(super) fn describe(self, places: &Places) -> Described {
        let ask = |argument: &str| first_line(&self.binary(places).to_string_lossy(), &[argument]);
        let bench = of_this();
        let (version, settings) = match self {
            Self::Floor => (bench, "one thread, each frame written at once"),
            Self::FloorWindow => (bench, "one thread, what is published within 1 ms written together"),
            Self::FloorIoUring => (bench, "as floor, all subscribers written to with one call"),
            Self::FloorWindowIoUring => {
                (bench, "as floor, 1 ms window, all subscribers written to with one call")
            }
            Self::FloorTwoThreads => {
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
        Described { name: self.name(), version, settings }
    }
}

impl Described {
    /// What is no server, but has rows.
    pub(super) fn bare_loop() -> Self {
        let settings = "embedded store without a node, rows made in one thread and committed in another, tables and sealing as the node has them, a batch and an fsync for each group";
        Self { name: "bare store loop", version: of_this(), settings: settings.to_owned() }
    }
}

fn of_this() -> String {
    concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// Where the system refuses it the node is measured without, and a delivery costs more.
fn io_uring(places: &Places) -> String {
    let node = Contender::Fanfare.start(places);
    let threads = node.and_then(|node| Admin::of(&node)?.metric("fanfare_io_uring_shards"));
    match threads {
        Ok(threads) => format!("io_uring in {threads} threads"),
        Err(error) => format!("io_uring not known: {error}"),
    }
}

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, version, settings } = self;
        write!(f, "server   {name}: {version}; {settings}")
    }
}
