//! Peers without a certificate of the cluster get nothing, and the node keeps running.

use std::cell::Cell;

use futures_util::future::join_all;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::*;

/// Bytes that a stranger could read after its request: none if it was refused.
async fn read_with(config: ClientConfig, addr: SocketAddr) -> std::io::Result<Vec<u8>> {
    let name = ServerName::try_from(SERVER_NAME).expect("a name");
    let socket = TcpStream::connect(addr).await?;
    let mut socket = TlsConnector::from(Arc::new(config)).connect(name, socket).await?;
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await?;
    let mut bytes = vec![0; 1024];
    let count = timeout(DEADLINE, socket.read(&mut bytes)).await.expect("an end or an answer")?;
    bytes.truncate(count);
    Ok(bytes)
}

fn refused(read: &std::io::Result<Vec<u8>>) -> bool {
    read.as_ref().map_or(true, Vec::is_empty)
}

fn refusals() -> u64 {
    let page = crate::telemetry::metrics().render();
    let of_reason = page.lines().filter(|line| line.starts_with("fanfare_peer_handshakes_refused_total{"));
    of_reason.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
}

/// The roots of a client of this cluster.
fn roots() -> RootCertStore {
    PeerTls::roots_of(&key(&[SECRET]))
}

fn client(
    versions: &[&'static rustls::SupportedProtocolVersion],
) -> rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .expect("versions of this build")
        .with_root_certificates(roots())
}

/// The configuration with a certificate and key issued under this secret.
fn proven(mut config: ClientConfig, secret: [u8; 32]) -> ClientConfig {
    let tls = PeerTls::from_key(&key(&[secret])).expect("the key makes certificates");
    config.client_auth_cert_resolver = Arc::clone(&tls.client.client_auth_cert_resolver);
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

#[tokio::test]
async fn strangers_get_nothing_and_peers_go_on() {
    let before = refusals();
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    two.link_to(&[&one]).await;
    let tls13 = || client(&[&rustls::version::TLS13]).with_no_client_auth();
    let tls12 = client(&[&rustls::version::TLS12]).with_no_client_auth();

    // The same dial with the right certificate, so that the later refusals have the reason that they name.
    let answered = read_with(proven(tls13(), SECRET), one.addr).await;
    assert!(!refused(&answered), "{answered:?}");

    assert!(refused(&read_with(tls13(), one.addr).await), "no certificate");
    assert!(refused(&read_with(proven(tls13(), [9; 32]), one.addr).await), "a certificate of a foreign CA");
    let old = read_with(proven(tls12, SECRET), one.addr).await;
    assert!(old.is_err(), "TLS 1.2");

    let mut plain = TcpStream::connect(one.addr).await.expect("the listener is there");
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("the socket takes it");
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = timeout(DEADLINE, plain.read_to_end(&mut bytes)).await.expect("the node ends it");
    assert!(bytes.len() <= 7, "no more than an alert: {bytes:?}");

    assert!(refusals() >= before + 4);
    assert_eq!(timeout(DEADLINE, two.send(&one, "room", 1)).await, Ok(Ok(())));
    assert_eq!(one.seen.borrow().forwarded.len(), 1);
}

#[tokio::test]
async fn a_node_of_another_cluster_links_neither_way() {
    let (one, foreign) = (
        LinkTestNode::start(1).await,
        LinkTestNode::start_with(2, &[[9; 32]], LinkSettings::default()).await,
    );
    let friend = LinkTestNode::start(3).await;
    foreign.links.set_peers(vec![one.at(one.addr)]);
    one.links.set_peers(vec![foreign.at(foreign.addr), friend.at(friend.addr)]);
    one.until("the friend is linked", |seen| seen.is_up(3)).await;
    foreign.send(&one, "room", 1);
    // Longer than an attempt and the next.
    tokio::time::sleep(RETRY * 3).await;
    assert!(!one.seen.borrow().is_up(2) && !foreign.seen.borrow().is_up(1));
    assert_eq!(one.seen.borrow().forwarded.len(), 0);
}

/// Far more than there are slots.
const SILENT: usize = 400;

/// Keeps a silent connection as long as the node allows, and reconnects at once.
async fn stays_silent(addr: SocketAddr, opened: &Cell<usize>) {
    loop {
        let Ok(mut socket) = TcpStream::connect(addr).await else { continue };
        // No lingering socket after the end, so that ports stay free for the peer.
        socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO)).expect("a socket");
        opened.set(opened.get() + 1);
        let _ = socket.read(&mut [0]).await;
    }
}

#[tokio::test]
async fn silent_strangers_keep_no_peer_out() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    let opened = Cell::new(0);
    let strangers = join_all((0..SILENT).map(|_| stays_silent(one.addr, &opened)));
    let peer = async {
        timeout(DEADLINE, async {
            while opened.get() < 2 * SILENT {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the strangers come back");
        two.link_to(&[&one]).await;
        assert_eq!(timeout(DEADLINE, two.send(&one, "room", 1)).await, Ok(Ok(())));
    };
    tokio::select! {
        () = peer => {}
        _ = strangers => unreachable!("they never end"),
    }
}
