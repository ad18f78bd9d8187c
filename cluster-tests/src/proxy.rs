//! A relay of TCP connections that a test can cut.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Address without a listener.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);

/// A relay of TCP connections to one node, which can be cut. Dropping it ends all connections.
pub struct Proxy {
    addr: SocketAddr,
    target: Arc<Mutex<SocketAddr>>,
    /// Number of cuts. A change ends the connections that began earlier.
    cuts: watch::Sender<u64>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    /// Starts a relay on a port of its own.
    pub async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("bound");
        let target = Arc::new(Mutex::new(target));
        let (cuts, cut) = watch::channel(0);
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, Arc::clone(&target), cut));
        Self { addr, target, cuts, _accepting: accepting }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn url(&self) -> String {
        format!("ws://{}", self.addr)
    }

    /// Sets the target of connections that begin from now on.
    pub fn turn_to(&self, target: SocketAddr) {
        *self.target.lock().unwrap_or_else(PoisonError::into_inner) = target;
    }

    /// Refuses connections from now on. To be called before a node ends, whose port may then be that of another node.
    pub fn turn_away(&self) {
        self.turn_to(NOWHERE);
    }

    /// Ends every connection, dropping the bytes that are on their way.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

async fn accept(listener: TcpListener, target: Arc<Mutex<SocketAddr>>, cut: watch::Receiver<u64>) {
    let mut relaying = JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        while relaying.try_join_next().is_some() {}
        let target = *target.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cut = cut.clone();
        cut.mark_unchanged();
        relaying.spawn(async move {
            tokio::select! {
                () = relay(client, target) => {}
                // The proxy is dropped or cut.
                _ = cut.changed() => {}
            }
        });
    }
}

/// Relays one connection. If the target is unreachable, the client's connection is closed.
async fn relay(mut client: TcpStream, target: SocketAddr) {
    let Ok(mut node) = TcpStream::connect(target).await else { return };
    if client.set_nodelay(true).is_ok() && node.set_nodelay(true).is_ok() {
        // Both ends see how the connection ended.
        let _ = copy_bidirectional(&mut client, &mut node).await;
    }
}
