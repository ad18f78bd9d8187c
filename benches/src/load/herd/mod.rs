//! Connections that come at once, or so many at a time, and how long each takes until it is attached.

mod comer;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use clap::Args;
use fanfare_client::Key;
use fanfare_client::sign::{self, JwtParams};
use mio::{Events, Interest, Poll, Token};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{Cost, Meter, Target};
use crate::histogram::Histogram;
use crate::wire::dialect::Dialect;
use crate::wire::reader::SHARED_BYTES;
use crate::{Result, os};
use comer::Comer;

/// What has not been attached by then counts as refused.
const PATIENCE: Duration = Duration::from_secs(60);
const TOKEN_SECONDS: u64 = 3_600;

#[derive(Args, Clone)]
pub struct Herd {
    #[command(flatten)]
    pub target: Target,
    #[arg(long)]
    pub connections: usize,
    /// How many are on their way at once; without it all of them.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub together: Option<u64>,
    /// How many addresses they come from, in turn: 127.0.0.2 and the next ones.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=250))]
    pub sources: u8,
    /// Each brings a token of its own, a JWT signed with the key before the clock starts.
    #[arg(long, requires = "key_file")]
    pub sign: bool,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub connections: usize,
    /// Refused, lost, or not attached in time.
    pub refused: usize,
    /// Why the first one was.
    pub refusal: Option<String>,
    /// From its beginning until it is attached, over the connections.
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// From the beginning of the first until all are attached.
    pub cost: Cost,
}

impl Herd {
    pub fn run(&self) -> Result<Outcome> {
        let upgrades = self.upgrades()?;
        let together = self
            .together
            .map_or(self.connections, |together| usize::try_from(together).unwrap_or(usize::MAX));
        let mut field = Field::new(self.target.dialect)?;
        let meter = Meter::start(&self.target.server_pids)?;
        let deadline = Instant::now() + PATIENCE;
        while field.arrived() < self.connections && Instant::now() < deadline {
            while field.comers.len() < self.connections && field.under_way() < together {
                let number = field.comers.len();
                let upgrade = &upgrades[number % upgrades.len()];
                field.begin(self.source(number), self.target.address, upgrade);
            }
            field.turn()?;
        }
        let cost = meter.stop()?;
        Ok(Outcome {
            connections: self.connections,
            refused: self.connections - field.attached,
            refusal: field.refusal,
            p50_ms: field.times.quantile_ms(0.5),
            p99_ms: field.times.quantile_ms(0.99),
            cost,
        })
    }

    /// One for all, or one for each with a token of its own.
    fn upgrades(&self) -> Result<Vec<Vec<u8>>> {
        let host = self.target.address.to_string();
        let upgrade = |authorization: Option<&str>| self.target.dialect.upgrade(&host, authorization);
        let (true, Some(key_file)) = (self.sign, &self.target.key_file) else {
            return Ok(vec![upgrade(self.target.authorization()?.as_deref())]);
        };
        let key: Key = std::fs::read_to_string(key_file)?.trim().parse()?;
        let signed = (0..self.connections).map(|number| {
            let params = JwtParams {
                capability: r#"{"bench:*":["subscribe"]}"#.to_owned(),
                client_id: Some(format!("herd-{number}")),
                issued_s: None,
                ttl_s: TOKEN_SECONDS,
            };
            Ok(upgrade(Some(&format!("Bearer {}", sign::jwt(&key, &params)?))))
        });
        signed.collect()
    }

    fn source(&self, number: usize) -> SocketAddr {
        let last = 2 + (number % usize::from(self.sources)) as u8;
        (Ipv4Addr::new(127, 0, 0, last), 0).into()
    }
}

/// All that have begun.
struct Field {
    poll: Poll,
    events: Events,
    shared: Vec<u8>,
    dialect: Dialect,
    /// None once refused.
    comers: Vec<Option<Comer>>,
    attached: usize,
    refused: usize,
    refusal: Option<String>,
    times: Histogram,
}

impl Field {
    fn new(dialect: Dialect) -> io::Result<Self> {
        Ok(Self {
            poll: Poll::new()?,
            events: Events::with_capacity(1024),
            shared: vec![0; SHARED_BYTES],
            dialect,
            comers: Vec::new(),
            attached: 0,
            refused: 0,
            refusal: None,
            times: Histogram::default(),
        })
    }

    fn arrived(&self) -> usize {
        self.attached + self.refused
    }

    fn under_way(&self) -> usize {
        self.comers.len() - self.arrived()
    }

    fn begin(&mut self, source: SocketAddr, address: SocketAddr, upgrade: &[u8]) {
        let number = self.comers.len();
        let begun = connect(source, address).and_then(|mut stream| {
            let both = Interest::READABLE | Interest::WRITABLE;
            self.poll.registry().register(&mut stream, Token(number), both)?;
            Ok(Comer::new(stream, self.dialect, format!("bench:herd:{number}"), upgrade))
        });
        match begun {
            Ok(comer) => self.comers.push(Some(comer)),
            Err(error) => {
                self.comers.push(None);
                self.refuse(&error.into());
            }
        }
    }

    fn turn(&mut self) -> io::Result<()> {
        match self.poll.poll(&mut self.events, Some(Duration::from_millis(20))) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            polled => polled?,
        }
        let ready: Vec<usize> = self.events.iter().map(|event| event.token().0).collect();
        for at in ready {
            let Some(comer) = &mut self.comers[at] else { continue };
            let was_attached = comer.is_attached();
            match comer.turn(&mut self.shared) {
                Ok(()) if comer.is_attached() && !was_attached => {
                    self.times.record(os::monotonic_ns().saturating_sub(comer.began_ns));
                    self.attached += 1;
                }
                Ok(()) => {}
                Err(error) => {
                    self.comers[at] = None;
                    self.attached -= usize::from(was_attached);
                    self.refuse(&error);
                }
            }
        }
        Ok(())
    }

    fn refuse(&mut self, error: &crate::Error) {
        self.refused += 1;
        self.refusal.get_or_insert_with(|| error.to_string());
    }
}

/// Begins a connection; whether it stands is known when the socket is writable.
fn connect(source: SocketAddr, address: SocketAddr) -> io::Result<mio::net::TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None)?;
    socket.set_tcp_nodelay(true)?;
    socket.bind(&source.into())?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        connected => connected?,
    }
    Ok(mio::net::TcpStream::from_std(socket.into()))
}
