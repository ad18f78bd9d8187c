//! Threads of the baseline server, each with its part of the connections.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use mio::net::TcpStream;
use mio::{Poll, Token, Waker};

pub(super) const WAKE: Token = Token(usize::MAX - 1);

/// Message from one thread of the baseline server to another.
pub(super) enum ThreadMessage {
    Peer(TcpStream),
    /// Message that was published at the other thread: the name of the channel, and its frame.
    Message(String, Arc<[u8]>),
}

/// Sender to one thread of the baseline server.
#[derive(Clone)]
pub(super) struct ThreadSender {
    sender: Sender<ThreadMessage>,
    waker: Arc<Waker>,
}

impl ThreadSender {
    pub(super) fn send(&self, handed: ThreadMessage) -> io::Result<()> {
        self.sender.send(handed).map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.waker.wake()
    }
}

/// Parts from which a thread makes its baseline server.
pub(super) struct ThreadContext {
    pub(super) poll: Poll,
    pub(super) inbox: Receiver<ThreadMessage>,
    pub(super) others: Vec<ThreadSender>,
}

/// Makes the parts of `count` threads, each with senders to all others.
pub(super) fn thread_contexts(count: usize) -> io::Result<Vec<ThreadContext>> {
    let (mut polls, mut entrances) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let poll = Poll::new()?;
        let (sender, inbox) = mpsc::channel();
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        polls.push((poll, inbox));
        entrances.push(ThreadSender { sender, waker });
    }
    let ground = |(own, (poll, inbox))| {
        let others = entrances.iter().enumerate().filter(|(at, _)| *at != own);
        ThreadContext { poll, inbox, others: others.map(|(_, entrance)| entrance.clone()).collect() }
    };
    Ok(polls.into_iter().enumerate().map(ground).collect())
}
