//! The client listener under TLS.

use std::sync::Arc;

use fanfare_client::{Client, Credential, Draft, Event, Options};
use fanfare_cluster_tests::raw::{self, End, Raw};
use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::tls::{self, TLS12, TLS13, Tls};
use fanfare_cluster_tests::{Node, NodeOptions, RunningCommand, SOON, http, node, wait_for, wait_until};
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::rustls::HandshakeKind;

const MESSAGES: usize = 1_000;

async fn open(tls: &Tls, node: &Node, query: &str) -> Socket {
    Socket::over(tls.raw(node.addr()).await, query, &http::basic(&node.key())).await
}

/// Asserts that the node serves over TLS and has not panicked.
async fn assert_well(tls: &Tls, node: &Node) {
    let health = tls.http(node.addr()).await.request("GET", "/health", &[], "").await.expect("an answer");
    assert_eq!((health.status, &health.body[..]), (200, &b"ok"[..]), "{}", node.log());
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_and_http_serve_each_other() {
    let tls = Tls::default();
    let options = tls.node().limit("publishes_per_second", 0).limit("history_page_bytes", 8 * 1024 * 1024);
    let node = Node::start(options).await;
    let authorization = http::basic(&node.key());
    let headers = [("authorization", authorization.as_str())];
    for version in [&TLS12, &TLS13] {
        let stream = TcpStream::connect(node.addr()).await.expect("accepted");
        let stream = tls::handshake(stream, tls.client(version)).await.expect("a handshake");
        assert_eq!(stream.get_ref().1.protocol_version(), Some(version.version));
        let mut socket = Socket::over(Raw::over(stream), "", &authorization).await;
        let channel = format!("over-{:?}", version.version);
        socket.attach(&channel).await;

        let stream = TcpStream::connect(node.addr()).await.expect("accepted");
        let stream = tls::handshake(stream, tls.client(version)).await.expect("a handshake");
        let mut http = http::Connection::over(stream, node.addr()).await.expect("a connection");
        let path = format!("/api/channels/{channel}/publish");
        for number in 0..MESSAGES {
            let body = json!({"data": number}).to_string();
            let answer = http.request("POST", &path, &headers, body).await.expect("an answer");
            assert_eq!(answer.status, 200, "{:?}", answer.body);
        }
        for number in 0..MESSAGES {
            assert_eq!(socket.message(&channel).await["messages"][0]["data"], number);
        }

        for number in 0..MESSAGES {
            let filler = "x".repeat(number % 100 * 100);
            socket.start(json!({"op": 13, "channel": channel, "data": [number, filler]})).await;
        }
        for number in 0..MESSAGES {
            assert_eq!(socket.message(&channel).await["messages"][0]["data"][0], number);
        }
        // Answers come in order, so all earlier messages are stored as well.
        socket.publish(&channel, json!({"data": ["last"]})).await;
        // Several times the size that is encrypted at once.
        let path = format!("/api/channels/{channel}/history?limit=1000");
        let page = http.request("GET", &path, &headers, "").await.expect("an answer").json();
        let messages = page["messages"].as_array().expect("messages");
        assert_eq!((messages.len(), &messages[0]["data"][0]), (MESSAGES, &json!("last")));
        assert_eq!(messages[1]["data"][0], MESSAGES - 1);
        assert!(page.to_string().len() > 4_000_000);
    }
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn upgrade_after_another_request_keeps_the_tls_session() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    let mut raw = tls.raw(node.addr()).await;
    for _ in 0..3 {
        raw.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        let (status, _, body) = raw.response(SOON).await.expect("an answer");
        assert_eq!((status, body.as_str()), (200, "ok"));
    }
    let mut socket = Socket::over(raw, "", &http::basic(&node.key())).await;
    socket.attach("later").await;
    socket.publish("later", json!({"data": 1})).await;
    assert_eq!(socket.message("later").await["messages"][0]["data"], 1);

    let mut refused = tls.raw(node.addr()).await;
    let (status, head) = refused.upgrade("/realtime", &[]).await;
    assert_eq!(status, 401, "{head}");
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_in_one_tls_record_with_an_upgrade_are_all_read() {
    const FRAMES: usize = 35;
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    let mut raw = tls.raw(node.addr()).await;
    raw.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(raw.response(SOON).await.expect("an answer").0, 200);
    let mut together = format!(
        "GET /realtime HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nauthorization: {}\r\n\r\n",
        http::basic(&node.key())
    )
    .into_bytes();
    for number in 0..FRAMES {
        let heartbeat = json!({"op": 0, "id": format!("{number:0400}")}).to_string();
        together.extend(raw::frame(raw::FIN | raw::TEXT, heartbeat.as_bytes()));
    }
    assert!(together.len() < 16 * 1024, "one record");
    raw.write(&together).await;
    assert_eq!(raw.head(SOON).await.expect("an answer").0, 101);
    let mut socket = Socket::upgraded(raw, false).await;
    for number in 0..FRAMES {
        assert_eq!(socket.next().await["id"], format!("{number:0400}"));
    }
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http_1_1_is_agreed_on_and_sessions_are_resumed() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    for version in [&TLS12, &TLS13] {
        let mut config = tls.client(version);
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let config = Arc::new(config);
        for kind in [HandshakeKind::Full, HandshakeKind::Resumed] {
            let stream = TcpStream::connect(node.addr()).await.expect("accepted");
            let mut stream = tls::handshake(stream, config.clone()).await.expect("a handshake");
            stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            // An end without close_notify would be an error here.
            timeout(SOON, stream.read_to_string(&mut answer)).await.expect("in time").expect("a clean end");
            assert!(answer.ends_with("ok"), "{answer}");
            let connection = stream.get_ref().1;
            assert_eq!(connection.alpn_protocol(), Some(&b"http/1.1"[..]));
            let found = connection.handshake_kind();
            // TLS 1.3 has a kind of its own for a first handshake with another round trip.
            let full = matches!(found, Some(HandshakeKind::Full | HandshakeKind::FullWithHelloRetryRequest));
            assert_eq!(full, kind == HandshakeKind::Full, "{found:?}");
        }
    }
    let mut config = tls.client(&TLS13);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(node.addr()).await.expect("accepted");
    tls::handshake(stream, config).await.expect_err("h2 alone is not served");
}

#[tokio::test(flavor = "multi_thread")]
async fn renewed_certificate_serves_new_connections_and_keeps_old() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    let first = tls::peer(&tls.connect(node.addr()).await);
    let mut old = open(&tls, &node, "").await;
    old.attach("kept").await;
    let mut kept = tls.http(node.addr()).await;
    kept.request("GET", "/health", &[], "").await.expect("an answer");

    let second = tls.renew();
    assert_ne!(first, second);
    wait_until(SOON, "the new certificate", async || tls::peer(&tls.connect(node.addr()).await) == second)
        .await;
    let mut new = open(&tls, &node, "").await;
    new.publish("kept", json!({"data": 1})).await;
    assert_eq!(old.message("kept").await["messages"][0]["data"], 1);
    assert_eq!(kept.request("GET", "/health", &[], "").await.expect("an answer").status, 200);
    assert_eq!(node.metric("fanfare_tls_certificate_generation").await, 2.0);
    assert_eq!(node.metric("fanfare_tls_certificate_errors_total").await, 0.0);

    std::fs::write(tls.certificate(), "broken").expect("written");
    wait_until(SOON, "the refusal", async || {
        node.metric("fanfare_tls_certificate_errors_total").await == 1.0
    })
    .await;
    let line = wait_for(SOON, "a line of the log", async || {
        node.log().lines().find(|line| line.contains("certificate refused")).map(str::to_owned)
    })
    .await;
    assert!(line.contains("node.crt") && line.contains("holds no certificate"), "{line}");
    assert_eq!(tls::peer(&tls.connect(node.addr()).await), second, "nothing has changed");

    let third = tls.renew();
    wait_until(SOON, "a good certificate again", async || {
        tls::peer(&tls.connect(node.addr()).await) == third
    })
    .await;
    old.publish("kept", json!({"data": 2})).await;
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_without_tls_is_closed_at_once() {
    let tls = Tls::default();
    let node = Node::start(tls.node().limit("header_ms", 600_000)).await;
    let before = node.resident_bytes();
    // A ClientHello that claims 16 MB, in complete records.
    let mut huge = Vec::new();
    for part in 0..200 {
        huge.extend([22, 3, 1, 0x40, 0]);
        huge.extend(if part == 0 { [1, 0xFF, 0xFF, 0xFF] } else { [0; 4] });
        huge.resize(huge.len() + 0x4000 - 4, 0);
    }
    let cases: [(&str, &[u8]); 5] = [
        ("plain HTTP", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
        ("a plain upgrade", b"GET /realtime HTTP/1.1\r\nupgrade: websocket\r\n\r\n"),
        ("SSL 2", &[0x80, 0x2E, 1, 0, 2, 0, 0, 0, 0, 0]),
        ("a record before the handshake", &[23, 3, 3, 0, 5, 1, 2, 3, 4, 5]),
        ("a huge ClientHello", &huge),
    ];
    for (what, bytes) in cases {
        for _ in 0..20 {
            let mut raw = Raw::connect(node.addr()).await;
            raw.write(bytes).await;
            assert_eq!(raw.end(SOON).await, End::Gone, "{what}");
        }
    }
    assert_well(&tls, &node).await;
    node::wait_until_small(&node, before + 32 * 1024 * 1024).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_has_the_time_of_a_head() {
    let tls = Tls::default();
    let node = Node::start(tls.node().limit("header_ms", 1_000)).await;
    let mut silent = Raw::connect(node.addr()).await;
    let mut half = Raw::connect(node.addr()).await;
    half.write(&[22, 3, 1, 0x02, 0, 1, 0, 1]).await;
    // The handshake is complete, and no request follows.
    let mut idle = tls.raw(node.addr()).await;
    for (what, raw) in [("silent", &mut silent), ("half", &mut half), ("idle", &mut idle)] {
        assert_eq!(raw.end(SOON).await, End::Gone, "{what}");
    }
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_closed_client_gets_its_answer_and_both_ends_are_said() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    let mut stream = tls.connect(node.addr()).await;
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("written");
    stream.shutdown().await.expect("close_notify is sent");
    let mut answer = String::new();
    timeout(SOON, stream.read_to_string(&mut answer)).await.expect("in time").expect("a clean end");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok"), "{answer}");

    let mut socket = open(&tls, &node, "").await;
    socket.send(&json!({"op": 5})).await;
    let (frames, ended) = socket.to_end(SOON).await;
    assert_eq!((frames, ended), (vec![json!({"op": 6})], SocketEnd::Closed(1000)));

    let mut socket = open(&tls, &node, "").await;
    let open = node.metric("fanfare_socket_connections").await;
    socket.raw().half_close().await;
    assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Gone);
    let ended = async || node.metric("fanfare_socket_connections").await < open;
    wait_until(SOON, "the end of the session", ended).await;
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_reader_is_ended_in_bounded_memory_and_others_read_all() {
    const FLOOD: usize = 400;
    let tls = Tls::default();
    let node = Node::start(tls.node().limit("publishes_per_second", 0)).await;
    let before = node.resident_bytes();
    let slow = tls.raw_slow(node.addr(), 16 * 1024).await;
    let mut slow = Socket::over(slow, "", &http::basic(&node.key())).await;
    slow.attach("flood").await;
    let mut reader = open(&tls, &node, "").await;
    reader.attach("flood").await;
    let mut writer = open(&tls, &node, "").await;
    let filler = "x".repeat(60_000);
    for number in 0..FLOOD {
        writer.publish("flood", json!({"data": [number, filler]})).await;
        assert_eq!(reader.message("flood").await["messages"][0]["data"][0], number);
    }
    let (frames, ended) = slow.to_end(SOON).await;
    assert!(frames.len() < FLOOD, "the slow one did not get all of it");
    assert!(matches!(ended, SocketEnd::Closed(4008) | SocketEnd::Gone), "{ended:?}");
    assert_eq!(node.metric("fanfare_slow_consumers_total").await, 1.0);
    let grown = node.resident_bytes().saturating_sub(before);
    assert!(grown < 64 * 1024 * 1024, "a slow consumer cost {grown} bytes");
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reader_that_takes_nothing_is_ended_despite_outbox_space() {
    let tls = Tls::default();
    let options = tls.node().limit("publishes_per_second", 0).limit("outbox_bytes", 256 * 1024 * 1024);
    let node = Node::start(options.limit("outbox_stall_ms", 1_000)).await;
    let key = http::basic(&node.key());
    let mut stalled = Socket::over(tls.raw_slow(node.addr(), 4 * 1024).await, "", &key).await;
    stalled.attach("flood").await;
    let mut writer = open(&tls, &node, "").await;
    // More than the kernel's buffers hold.
    let filler = "x".repeat(60_000);
    for number in 0..200 {
        writer.publish("flood", json!({"data": [number, filler]})).await;
    }
    let one = async || node.metric("fanfare_slow_consumers_total").await == 1.0;
    wait_until(SOON, "the end of the stalled one", one).await;
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_library_trusts_only_the_given_authority() {
    let tls = Tls::default();
    let node = Node::start(tls.node().limit("publishes_per_second", 0)).await;
    let authority = std::fs::read(tls.authority()).expect("written");
    for scheme in ["https", "wss"] {
        let url = format!("{scheme}://127.0.0.1:{}", node.addr().port());
        let mut options = Options::new(url, Credential::Key(node.key()));
        Client::connect(options.clone()).await.err().expect("an unknown authority");
        options.authorities = Some(authority.clone());
        let mut client = Client::connect(options.clone()).await.expect("connected");
        client.attach(scheme).await.expect("attached");
        for _ in 0..MESSAGES / 10 {
            client.publish(scheme, vec![Draft::default(); 10]).await.expect("acknowledged");
            let Some(Event::Messages(delivery)) = client.next().await else { unreachable!("messages") };
            assert_eq!(delivery.messages.len(), 10);
        }
        client.close().await.expect("closed");
        options.url = options.url.replace("127.0.0.1", "127.0.0.2");
        Client::connect(options.clone()).await.err().expect("another name than the certificate's");
        options.url = format!("ws://{}", node.addr());
        Client::connect(options).await.err().expect("plain against TLS");
    }
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_beside_the_node_speak_tls_when_it_does() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    let file = node.data_dir().join("node.json");
    let file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(file).expect("a running node has it")).expect("JSON");
    assert_eq!(file["tls"], true);

    let (authority, data) = (tls.authority(), node.data_dir());
    let (authority, data) = (authority.to_str().expect("UTF-8"), data.to_str().expect("UTF-8"));
    let beside = ["--data-dir", data, "--ca-cert", authority];
    let following = RunningCommand::start(&[&["sub", "demo"], &beside[..]].concat());
    following.wait_for_stderr("attached to demo", 0).await;
    let mut publishing = RunningCommand::start(&[&["pub", "demo", "17"], &beside[..]].concat());
    assert_eq!(publishing.ended().await.code(), Some(0), "{:?}", publishing.stderr());
    let lines = following.wait_for_stdout(1).await;
    assert!(lines[0].contains("\"data\":17,"), "{lines:?}");

    let mut untrusting = RunningCommand::start(&["pub", "demo", "17", "--data-dir", data]);
    assert_eq!(untrusting.ended().await.code(), Some(1));
    let refused = "the certificate of 127.0.0.1 is not accepted: no authority that is trusted here has signed it; name the certificate of \
                   the one that did by --ca-cert";
    untrusting.wait_for_stderr(refused, 0).await;
    assert_well(&tls, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn self_signed_certificate_is_trusted_unless_it_is_an_authority() {
    for (is_ca, name, expected) in [
        (IsCa::ExplicitNoCa, "127.0.0.1", None),
        (IsCa::NoCa, "127.0.0.1", None),
        (
            IsCa::Ca(BasicConstraints::Unconstrained),
            "127.0.0.1",
            Some("it is that of an authority (CA:TRUE)"),
        ),
        (IsCa::NoCa, "elsewhere", Some("not valid for name \"127.0.0.1\"")),
    ] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (file, key_file) = (folder.path().join("own.crt"), folder.path().join("own.key"));
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        params.is_ca = is_ca;
        std::fs::write(&file, params.self_signed(&key).expect("a certificate").pem()).expect("written");
        std::fs::write(&key_file, key.serialize_pem()).expect("written");
        let (file, key_file) = (file.to_str().expect("UTF-8"), key_file.to_str().expect("UTF-8"));
        let options = NodeOptions::default()
            .environment("FANFARE_TLS_CERT", file)
            .environment("FANFARE_TLS_KEY", key_file);
        let node = Node::start(options).await;
        let data = node.data_dir().to_str().expect("UTF-8");
        let mut publishing =
            RunningCommand::start(&["pub", "demo", "1", "--data-dir", data, "--ca-cert", file]);
        let exit = publishing.ended().await.code();
        match expected {
            None => assert_eq!(exit, Some(0), "{:?}", publishing.stderr()),
            Some(reason) => {
                assert_eq!(exit, Some(1));
                publishing.wait_for_stderr(reason, 0).await;
            }
        }
        node.assert_no_panic();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_command_to_a_plain_node_reports_the_missing_tls() {
    let node = Node::start(NodeOptions::default()).await;
    let url = format!("https://{}", node.addr());
    let mut asking = RunningCommand::start(&["pub", "demo", "1", "--url", &url, "--key", &node.key()]);
    assert_eq!(asking.ended().await.code(), Some(1));
    asking.wait_for_stderr("no TLS is spoken there", 0).await;
}
