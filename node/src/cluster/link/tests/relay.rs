//! A relay of TCP connections that a test can cut or hold.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct RelayState {
    /// Incremented by the test to end all existing connections.
    cuts: u64,
    /// True: no byte passes from the target to the client.
    answers_held: bool,
    /// True: no byte passes at all.
    held: bool,
}

pub(super) struct TcpRelay {
    pub(super) addr: SocketAddr,
    state: watch::Sender<RelayState>,
    _accepting: JoinSet<()>,
}

impl TcpRelay {
    pub(super) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("bound");
        let (state, watched) = watch::channel(RelayState::default());
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, target, watched));
        Self { addr, state, _accepting: accepting }
    }

    pub(super) fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }

    pub(super) fn hold_answers(&self, held: bool) {
        self.state.send_modify(|state| state.answers_held = held);
    }

    pub(super) fn hold(&self, held: bool) {
        self.state.send_modify(|state| state.held = held);
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, state: watch::Receiver<RelayState>) {
    let mut relaying = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        while relaying.try_join_next().is_some() {}
        let Ok(node) = TcpStream::connect(target).await else { continue };
        let ((from_client, to_client), (from_node, to_node)) = (client.into_split(), node.into_split());
        let mut cut = state.clone();
        let cuts = cut.borrow().cuts;
        let (requests, answered) = (state.clone(), state.clone());
        relaying.spawn(async move {
            tokio::select! {
                _ = cut.wait_for(|state| state.cuts > cuts) => {}
                () = pass(from_client, to_node, requests, |state| !state.held) => {}
                () = pass(from_node, to_client, answered, |state| !state.held && !state.answers_held) => {}
            }
        });
    }
}

async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut state: watch::Receiver<RelayState>,
    may_pass: fn(&RelayState) -> bool,
) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        if state.wait_for(may_pass).await.is_err() {
            return;
        }
        let Ok(count @ 1..) = from.read(&mut buffer).await else { return };
        if state.wait_for(may_pass).await.is_err() || to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
}
