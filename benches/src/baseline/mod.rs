//! The baseline server: the cost of the same fan-out with nothing but the sockets.
//!
//! By default it is one thread with one epoll loop. It encodes a published message once and writes it into the socket
//! of each subscriber. It speaks as much of the protocol as the generator reads: connected, attached, message, ack.
//! With a window it writes once to each subscriber for all messages of the window. With io_uring one system call writes
//! to many sockets. With several threads each has a part of the connections and its own loop, and the thread that gets
//! a publish passes it to the others. It checks no credentials and no names and has no queues. It closes a subscriber
//! whose socket is full.

mod channel;
mod peer;
mod ring;
mod threads;

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read as _};
use std::mem;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use socket2::{Domain, Socket, Type};

use crate::Result;
use crate::wire::frames::{self, op};
use crate::wire::reader::SHARED_BYTES;
use channel::Channel;
use peer::Peer;
use ring::Ring;
use threads::{ThreadContext, ThreadMessage, ThreadSender, WAKE};

const LISTENER: Token = Token(usize::MAX);
const BACKLOG: i32 = 4096;

#[derive(Args)]
pub struct Options {
    /// Time for which a message may wait for others to go out in one write, in ms; 0 writes each at once.
    #[arg(long, default_value_t = 0)]
    pub window_ms: u64,
    /// Milliseconds between two heartbeats on each connection, as the node sends while nothing is published; 0: none.
    #[arg(long, default_value_t = 0)]
    pub heartbeat_ms: u64,
    /// Writes messages to many sockets with one system call.
    #[arg(long)]
    pub io_uring: bool,
    /// Threads, each with its part of the connections.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub threads: u8,
}

/// Serves on a free port until stdin ends. The address is the one line on stdout.
pub fn serve(options: &Options) -> Result<()> {
    let listener = listen()?;
    println!("{}", listener.local_addr()?);
    thread::spawn(exit_with_stdin);
    let mut grounds = threads::thread_contexts(usize::from(options.threads))?;
    let own = grounds.remove(0);
    thread::scope(|scope| {
        for ground in grounds {
            scope.spawn(move || {
                if let Err(error) = BaselineServer::new(ground, None, options).and_then(BaselineServer::run) {
                    eprintln!("a thread of the floor ends: {error}");
                    std::process::exit(1);
                }
            });
        }
        Ok(BaselineServer::new(own, Some(listener), options)?.run()?)
    })
}

fn exit_with_stdin() {
    let mut ignored = [0; 256];
    while matches!(io::stdin().read(&mut ignored), Ok(read) if read > 0) {}
    std::process::exit(0);
}

/// Listens on a free port, with the backlog of the node.
fn listen() -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from_std(socket.into()))
}

struct BaselineServer {
    poll: Poll,
    /// Listener, which one thread has; that thread deals the connections out.
    listener: Option<TcpListener>,
    accepted: usize,
    inbox: Receiver<ThreadMessage>,
    others: Vec<ThreadSender>,
    /// Connections by token. A token is not used again.
    peers: Vec<Option<Peer>>,
    channels: HashMap<String, Channel>,
    window: Duration,
    /// End of the open window.
    due: Option<Instant>,
    /// Peers with frames that wait for the end of the window.
    dirty: Vec<usize>,
    /// Time between two heartbeats of a connection; zero: no heartbeats.
    heartbeat: Duration,
    /// Next heartbeat of each connection, soonest first.
    beats: VecDeque<(Instant, usize)>,
    ring: Option<Ring>,
}

impl BaselineServer {
    /// Makes a baseline server. The thread that runs it has to call this.
    fn new(ground: ThreadContext, mut listener: Option<TcpListener>, options: &Options) -> io::Result<Self> {
        let ThreadContext { poll, inbox, others } = ground;
        if let Some(listener) = &mut listener {
            poll.registry().register(listener, LISTENER, Interest::READABLE)?;
        }
        let [window, heartbeat] = [options.window_ms, options.heartbeat_ms].map(Duration::from_millis);
        Ok(Self {
            poll,
            listener,
            accepted: 0,
            inbox,
            others,
            peers: Vec::new(),
            channels: HashMap::new(),
            window,
            due: None,
            dirty: Vec::new(),
            heartbeat,
            beats: VecDeque::new(),
            ring: options.io_uring.then(Ring::new).transpose()?,
        })
    }

    /// Serves connections until a call of the system fails.
    fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(1024);
        let mut shared = vec![0; SHARED_BYTES];
        loop {
            match self.poll.poll(&mut events, self.poll_timeout()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.accept()?,
                    WAKE => self.take_thread_messages()?,
                    Token(peer) => self.serve_peer(peer, &mut shared),
                }
            }
            self.flush_when_due()?;
            self.beat_when_due();
        }
    }

    /// Gives the time to wait for a socket: until a window ends or a heartbeat is due.
    fn poll_timeout(&self) -> Option<Duration> {
        let beat = self.beats.front().map(|(due, _)| *due);
        let first = self.due.into_iter().chain(beat).min();
        first.map(|due| due.saturating_duration_since(Instant::now()))
    }

    fn accept(&mut self) -> io::Result<()> {
        while let Some(listener) = &self.listener {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            stream.set_nodelay(true)?;
            self.accepted += 1;
            match self.others.get(self.accepted % (self.others.len() + 1)) {
                Some(other) => other.send(ThreadMessage::Peer(stream))?,
                None => self.add(stream)?,
            }
        }
        Ok(())
    }

    fn add(&mut self, mut stream: TcpStream) -> io::Result<()> {
        self.poll.registry().register(&mut stream, Token(self.peers.len()), Interest::READABLE)?;
        if !self.heartbeat.is_zero() {
            self.beats.push_back((Instant::now() + self.heartbeat, self.peers.len()));
        }
        self.peers.push(Some(Peer::new(stream)));
        Ok(())
    }

    fn take_thread_messages(&mut self) -> io::Result<()> {
        while let Ok(handed) = self.inbox.try_recv() {
            match handed {
                ThreadMessage::Peer(stream) => self.add(stream)?,
                ThreadMessage::Message(name, frame) => self.deliver(&name, &frame)?,
            }
        }
        Ok(())
    }

    fn serve_peer(&mut self, at: usize, shared: &mut [u8]) {
        let Some(peer) = &mut self.peers[at] else { return };
        let mut texts = Vec::new();
        let read = peer.read(shared, &mut texts);
        let answered = texts.iter().try_for_each(|text| self.answer(at, text));
        if read.and(answered).is_err() {
            self.close(at);
        }
    }

    fn answer(&mut self, at: usize, text: &str) -> io::Result<()> {
        match frames::op(text.as_bytes()) {
            Some(op::ATTACH) => self.attach(at, text),
            Some(op::MESSAGE) => self.publish(at, text),
            _ => Ok(()),
        }
    }

    fn attach(&mut self, at: usize, text: &str) -> io::Result<()> {
        let (Some(name), Some(id)) = (frames::text_field(text, "channel"), frames::text_field(text, "id"))
        else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let channel = self.channels.entry(name.to_owned()).or_default();
        channel.subscribers.push(at);
        let attached = channel.attached(id, name);
        self.send(at, &attached)
    }

    fn publish(&mut self, at: usize, text: &str) -> io::Result<()> {
        let name = frames::text_field(text, "channel").ok_or(io::ErrorKind::InvalidData)?;
        let channel = self.channels.entry(name.to_owned()).or_default();
        let frame: Arc<[u8]> = channel.message(name, text).ok_or(io::ErrorKind::InvalidData)?.into();
        let ack = channel.ack(text);
        for other in &self.others {
            other.send(ThreadMessage::Message(name.to_owned(), Arc::clone(&frame)))?;
        }
        self.deliver(name, &frame)?;
        self.send(at, &ack)
    }

    /// Delivers a frame to the subscribers of this thread.
    fn deliver(&mut self, name: &str, frame: &Arc<[u8]>) -> io::Result<()> {
        let Some(channel) = self.channels.get(name) else { return Ok(()) };
        if !self.window.is_zero() {
            for &subscriber in &channel.subscribers {
                if let Some(peer) = &mut self.peers[subscriber]
                    && peer.push(Arc::clone(frame))
                {
                    self.dirty.push(subscriber);
                }
            }
            self.due.get_or_insert_with(|| Instant::now() + self.window);
            return Ok(());
        }
        let mut full = Vec::new();
        if let Some(ring) = &mut self.ring {
            let write = |to: &usize| Some(self.peers[*to].as_ref()?.immediate_write(*to, frame));
            full = ring.write(&channel.subscribers.iter().filter_map(write).collect::<Vec<_>>())?;
        } else {
            for &subscriber in &channel.subscribers {
                if let Some(peer) = &mut self.peers[subscriber]
                    && peer.write(frame).is_err()
                {
                    full.push(subscriber);
                }
            }
        }
        full.into_iter().for_each(|subscriber| self.close(subscriber));
        Ok(())
    }

    fn flush_when_due(&mut self) -> io::Result<()> {
        if self.due.is_some_and(|due| Instant::now() >= due) {
            self.due = None;
            let dirty = mem::take(&mut self.dirty);
            if let Some(ring) = &mut self.ring {
                let write = |to: &usize| Some(self.peers[*to].as_ref()?.pending_write(*to));
                let full = ring.write(&dirty.iter().filter_map(write).collect::<Vec<_>>())?;
                full.into_iter().for_each(|at| self.close(at));
                dirty.iter().for_each(|at| self.peers[*at].iter_mut().for_each(Peer::clear_pending));
            }
            for at in dirty {
                // Writes the frames that were too many for one call, or all frames without io_uring.
                if self.peers[at].as_mut().is_some_and(|peer| peer.flush().is_err()) {
                    self.close(at);
                }
            }
        }
        Ok(())
    }

    fn beat_when_due(&mut self) {
        let now = Instant::now();
        while let Some((_, at)) = self.beats.pop_front_if(|(due, _)| *due <= now) {
            match self.send(at, &channel::heartbeat()) {
                Ok(()) if self.peers[at].is_some() => self.beats.push_back((now + self.heartbeat, at)),
                Ok(()) => {}
                Err(_) => self.close(at),
            }
        }
    }

    fn send(&mut self, at: usize, frame: &[u8]) -> io::Result<()> {
        self.peers[at].as_mut().map_or(Ok(()), |peer| peer.write(frame))
    }

    /// Closes a connection. Dropping its stream also takes it out of the poll. Its number stays in the lists of
    /// subscribers, where it is passed over.
    fn close(&mut self, at: usize) {
        self.peers[at] = None;
    }
}
