//! Floors beside each other, each with its thread and its part of the connections.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use mio::net::TcpStream;
use mio::{Poll, Token, Waker};

pub(super) const WAKE: Token = Token(usize::MAX - 1);

/// What one floor gives to another.
pub(super) enum Handed {
    Peer(TcpStream),
    /// Something that was published there: the name of the channel, and its frame.
    Message(String, Arc<[u8]>),
}

/// The way to a floor.
#[derive(Clone)]
pub(super) struct Entrance {
    sender: Sender<Handed>,
    waker: Arc<Waker>,
}

impl Entrance {
    pub(super) fn hand(&self, handed: Handed) -> io::Result<()> {
        self.sender.send(handed).map_err(|_| io::ErrorKind::BrokenPipe)?;
        self.waker.wake()
    }
}

/// What a floor is made of, on whichever thread.
pub(super) struct Ground {
    pub(super) poll: Poll,
    pub(super) inbox: Receiver<Handed>,
    pub(super) others: Vec<Entrance>,
}

/// So many that know each other.
pub(super) fn grounds(count: usize) -> io::Result<Vec<Ground>> {
    let (mut polls, mut entrances) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let poll = Poll::new()?;
        let (sender, inbox) = mpsc::channel();
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        polls.push((poll, inbox));
        entrances.push(Entrance { sender, waker });
    }
    let ground = |(own, (poll, inbox))| {
        let others = entrances.iter().enumerate().filter(|(at, _)| *at != own);
        Ground { poll, inbox, others: others.map(|(_, entrance)| entrance.clone()).collect() }
    };
    Ok(polls.into_iter().enumerate().map(ground).collect())
}
