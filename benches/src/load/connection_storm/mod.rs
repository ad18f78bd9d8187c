//! A connection storm: connections at once, or a bounded number at a time, with the time of each until it is attached.

mod connecting_client;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
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
use connecting_client::ConnectingClient;

/// Time after which a connection that is not attached counts as refused.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time that a thread waits for events before it checks whether all connections have arrived.
const LOOK_UP: Duration = Duration::from_millis(1);
const TOKEN_SECONDS: u64 = 3_600;

#[derive(Args, Clone)]
pub struct ConnectionStorm {
    #[command(flatten)]
    pub target: Target,
    /// Number of connections.
    #[arg(long)]
    pub connections: usize,
    /// Greatest number of connections that are being opened at once; without it all of them.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub together: Option<u64>,
    /// Number of threads that open the connections, each the same share; 0 is one for each core.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=64))]
    pub threads: u8,
    /// Number of source addresses, used in turn: 127.0.0.2 and the next ones.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=250))]
    pub sources: u8,
    /// Gives each connection a token of its own, a JWT signed with the key before the clock starts.
    #[arg(long, requires = "key_file")]
    pub sign: bool,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub connections: usize,
    /// Number of connections that were refused, lost, or not attached in time.
    pub refused: usize,
    /// Reason of the first refusal.
    pub refusal: Option<String>,
    /// Time from the beginning of a connection until it is attached, over all connections.
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// Cost from the beginning of the first connection until all are attached.
    pub cost: Cost,
}

impl ConnectionStorm {
    pub fn run(&self) -> Result<Outcome> {
        let upgrades = self.upgrades()?;
        let threads = match usize::from(self.threads) {
            0 => thread::available_parallelism()?.get(),
            threads => threads,
        };
        let all = SharedStorm { storm: self, upgrades, threads, arrived: AtomicUsize::new(0) };
        let fields: io::Result<Vec<StormThread>> =
            (0..threads).map(|_| StormThread::new(self.target.dialect)).collect();
        let mut fields = fields?;
        let meter = Meter::start(&self.target.server_pids)?;
        thread::scope(|scope| {
            let all = &all;
            let begin = |(nth, field)| scope.spawn(move || all.drive(nth, field));
            let running: Vec<_> = (0..).zip(&mut fields).map(begin).collect();
            running.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked")?)
        })?;
        let cost = meter.stop()?;
        let mut times = Histogram::default();
        fields.iter().for_each(|field| times.add(&field.times));
        Ok(Outcome {
            connections: self.connections,
            refused: self.connections - fields.iter().map(|field| field.attached).sum::<usize>(),
            refusal: fields.into_iter().find_map(|field| field.refusal),
            p50_ms: times.quantile_ms(0.5),
            p99_ms: times.quantile_ms(0.99),
            cost,
        })
    }

    /// Makes the upgrade request of all connections, or one for each if each has a token of its own.
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

/// State that the threads of a connection storm share.
struct SharedStorm<'a> {
    storm: &'a ConnectionStorm,
    upgrades: Vec<Vec<u8>>,
    threads: usize,
    /// Number of connections that are attached or refused, over all threads.
    arrived: AtomicUsize,
}

impl SharedStorm<'_> {
    /// Opens the connections of thread `nth`, and holds them until those of all threads have arrived.
    fn drive(&self, nth: usize, field: &mut StormThread) -> Result<()> {
        let ConnectionStorm { connections, together, target, .. } = self.storm;
        let together = together
            .map_or(usize::MAX, |all| usize::try_from(all).unwrap_or(usize::MAX).div_ceil(self.threads));
        let (mut numbers, mut counted) = ((nth..*connections).step_by(self.threads), 0);
        let deadline = Instant::now() + PATIENCE;
        while self.arrived.load(Ordering::Relaxed) < *connections && Instant::now() < deadline {
            while field.under_way() < together
                && let Some(number) = numbers.next()
            {
                let upgrade = &self.upgrades[number % self.upgrades.len()];
                field.begin(number, self.storm.source(number), target.address, upgrade);
            }
            field.turn()?;
            self.arrived.fetch_add(field.arrived() - counted, Ordering::Relaxed);
            counted = field.arrived();
        }
        Ok(())
    }
}

/// Connections that one thread has begun.
struct StormThread {
    poll: Poll,
    events: Events,
    shared: Vec<u8>,
    dialect: Dialect,
    /// Clients by number; `None` once refused.
    clients: Vec<Option<ConnectingClient>>,
    attached: usize,
    refused: usize,
    refusal: Option<String>,
    times: Histogram,
}

impl StormThread {
    fn new(dialect: Dialect) -> io::Result<Self> {
        Ok(Self {
            poll: Poll::new()?,
            events: Events::with_capacity(1024),
            shared: vec![0; SHARED_BYTES],
            dialect,
            clients: Vec::new(),
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
        self.clients.len() - self.arrived()
    }

    fn begin(&mut self, number: usize, source: SocketAddr, address: SocketAddr, upgrade: &[u8]) {
        let at = self.clients.len();
        let begun = connect(source, address).and_then(|mut stream| {
            let both = Interest::READABLE | Interest::WRITABLE;
            self.poll.registry().register(&mut stream, Token(at), both)?;
            Ok(ConnectingClient::new(stream, self.dialect, format!("bench:herd:{number}"), upgrade))
        });
        match begun {
            Ok(client) => self.clients.push(Some(client)),
            Err(error) => {
                self.clients.push(None);
                self.refuse(&error.into());
            }
        }
    }

    fn turn(&mut self) -> io::Result<()> {
        match self.poll.poll(&mut self.events, Some(LOOK_UP)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            polled => polled?,
        }
        let ready: Vec<usize> = self.events.iter().map(|event| event.token().0).collect();
        for at in ready {
            let Some(client) = &mut self.clients[at] else { continue };
            let was_attached = client.is_attached();
            match client.turn(&mut self.shared) {
                Ok(()) if client.is_attached() && !was_attached => {
                    self.times.record(os::monotonic_ns().saturating_sub(client.began_ns));
                    self.attached += 1;
                }
                Ok(()) => {}
                Err(error) => {
                    self.clients[at] = None;
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

/// Begins a connection. The socket becomes writable when it is established or has failed.
fn connect(source: SocketAddr, address: SocketAddr) -> io::Result<mio::net::TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None)?;
    socket.set_tcp_nodelay(true)?;
    os::choose_port_late(socket.as_fd())?;
    socket.bind(&source.into())?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        connected => connected?,
    }
    Ok(mio::net::TcpStream::from_std(socket.into()))
}
