//! Token flow of the client library: the application's server answers in one of three ways, and is asked again in time.

use std::net::SocketAddr;
use std::time::Duration;

use fanfare_client::sign::{self, JwtParams, TokenParams, TokenRequest};
use fanfare_client::{
    AuthUrl, Client, Connected, Credential, Ending, Event, Key, Options, Reconnect, TokenAnswer, TokenSource,
};
use fanfare_cluster_tests::{AuthServer, Node, NodeOptions, Proxy, SOON, Tls, http, wait_until};
use hyper::StatusCode;
use tokio::time::timeout;

const HOUR_MS: u64 = 3_600_000;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Jwt,
    JwtInJson,
    Details,
    Request,
}

/// Gives the answer of an application that holds the key of the node at `addr`.
async fn answer(kind: Kind, key: Key, addr: SocketAddr, ttl_ms: u64) -> String {
    match kind {
        Kind::Jwt => jwt(&key, ttl_ms),
        Kind::JwtInJson => serde_json::to_string(&jwt(&key, ttl_ms)).expect("JSON"),
        Kind::Details => {
            let path = format!("/keys/{}/requestToken", key.name());
            let given = http::request(addr, "POST", &path, &[], request(&key, ttl_ms)).await;
            String::from_utf8(given.body.to_vec()).expect("UTF-8")
        }
        Kind::Request => request(&key, ttl_ms),
    }
}

fn jwt(key: &Key, ttl_ms: u64) -> String {
    let capability = r#"{"*":["subscribe"]}"#.to_owned();
    let client_id = Some("ann".into());
    let params = JwtParams { capability, client_id, issued_s: None, ttl_s: ttl_ms / 1_000 };
    sign::jwt(key, &params).expect("a token")
}

fn request(key: &Key, ttl_ms: u64) -> String {
    serde_json::to_string(&signed(key, ttl_ms)).expect("JSON")
}

fn signed(key: &Key, ttl_ms: u64) -> TokenRequest {
    let params =
        TokenParams { ttl_ms: Some(ttl_ms), client_id: Some("ann".into()), ..TokenParams::default() };
    sign::token_request(key, params).expect("a request")
}

fn key_of(node: &Node) -> Key {
    node.key().parse().expect("a key")
}

/// Starts the token server of an application, for one kind of answer.
async fn application(node: &Node, kind: Kind, ttl_ms: u64) -> AuthServer {
    let (key, addr) = (key_of(node), node.addr());
    AuthServer::start(move || answer(kind, key.clone(), addr, ttl_ms)).await
}

fn options(url: String, source: TokenSource) -> Options {
    let reconnect = Reconnect { delay_min: Duration::from_millis(10), delay_max: Duration::from_millis(100) };
    Options { reconnect: Some(reconnect), ..Options::new(url, Credential::TokensFrom(source)) }
}

fn asking(application: &AuthServer) -> TokenSource {
    let headers = vec![("x-user".into(), "ann".into())];
    TokenSource::auth_url(AuthUrl { headers, ..AuthUrl::new(application.url()) })
}

async fn next(client: &mut Client) -> Event {
    timeout(SOON, client.next()).await.expect("an event comes").expect("it goes on")
}

/// Waits for the connection after a lost one.
async fn reconnected(client: &mut Client) -> Connected {
    loop {
        match next(client).await {
            Event::Connected(connected) => break connected,
            Event::Disconnected { .. } => {}
            other => unreachable!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_answer_connects_and_is_fetched_per_reconnect() {
    let node = Node::start(NodeOptions::default()).await;
    for kind in [Kind::Jwt, Kind::JwtInJson, Kind::Details, Kind::Request] {
        let proxy = Proxy::to(node.addr()).await;
        let application = application(&node, kind, HOUR_MS).await;
        let mut client =
            Client::connect(options(proxy.url(), asking(&application))).await.expect("connected");
        let first = client.connected().clone();
        assert_eq!((first.client_id.as_deref(), application.requests()), (Some("ann"), 1), "{kind:?}");
        for requests in 2..4 {
            proxy.cut();
            let again = reconnected(&mut client).await;
            assert_eq!((again.resumed, &again.connection_id), (true, &first.connection_id), "{kind:?}");
            assert_eq!(application.requests(), requests, "{kind:?}");
        }
        client.close().await.expect("closed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn expiry_in_a_session_refreshes_the_token_in_place() {
    let node = Node::start(NodeOptions::default()).await;
    for kind in [Kind::Jwt, Kind::Details, Kind::Request] {
        let application = application(&node, kind, 2_000).await;
        let mut client = Client::connect(options(node.url(), asking(&application))).await.expect("connected");
        let mut last = client.connected().clone();
        for requests in 2..4 {
            // A lost connection would be another event.
            let Event::Connected(fresh) = next(&mut client).await else { unreachable!("a fresh token") };
            assert_eq!((fresh.resumed, &fresh.connection_id), (true, &last.connection_id), "{kind:?}");
            assert!(fresh.expires > last.expires, "{kind:?}: {fresh:?} after {last:?}");
            assert!(application.requests() >= requests, "{kind:?}");
            last = fresh;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_auth_url_is_asked_again_until_it_denies() {
    let node = Node::start(NodeOptions::default()).await;
    let proxy = Proxy::to(node.addr()).await;
    let application = application(&node, Kind::Request, HOUR_MS).await;
    let mut client = Client::connect(options(proxy.url(), asking(&application))).await.expect("connected");
    application.refuse(Some(StatusCode::SERVICE_UNAVAILABLE));
    proxy.cut();
    wait_until(SOON, "three attempts", async || application.requests() >= 4).await;
    application.refuse(None);
    assert!(reconnected(&mut client).await.resumed);
    application.refuse(Some(StatusCode::FORBIDDEN));
    proxy.cut();
    let lost = next(&mut client).await;
    assert!(matches!(lost, Event::Disconnected { .. }), "{lost:?}");
    let ended = next(&mut client).await;
    assert!(matches!(ended, Event::Ended(Ending::Refused { code: 40_300, .. })), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_the_node_refuses_says_why() {
    let node = Node::start(NodeOptions::default()).await;
    let forged: Key = format!("wrong.{}", key_of(&node).name()).parse().expect("a key");
    let source = TokenSource::new(move || {
        let request = signed(&forged, HOUR_MS);
        async { Ok(request) }
    });
    let refused = Client::connect(options(node.url(), source)).await.err().expect("refused").to_string();
    assert!(refused.ends_with("gave status 401: invalid token request mac"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_exchanged_under_the_tls_of_the_node() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    let key = key_of(&node);
    let source = TokenSource::new(move || {
        let request = signed(&key, HOUR_MS);
        async { Ok(TokenAnswer::from(request)) }
    });
    let mut options = options(format!("wss://{}", node.addr()), source);
    options.authorities = Some(std::fs::read(tls.authority()).expect("the folder is readable"));
    let client = Client::connect(options).await.expect("connected");
    assert_eq!(client.connected().client_id.as_deref(), Some("ann"));
    client.close().await.expect("closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_auth_url_under_tls_trusts_its_own_authorities() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    let error = async |authorities| {
        let url = AuthUrl { authorities, ..AuthUrl::new(format!("https://{}/nothing", node.addr())) };
        let options = options(node.url(), TokenSource::auth_url(url));
        Client::connect(options).await.err().expect("no token").to_string()
    };
    let untrusted = error(None).await;
    assert!(untrusted.contains("certificate"), "{untrusted}");
    let authority = std::fs::read(tls.authority()).expect("the folder is readable");
    let answered = error(Some(authority)).await;
    assert!(answered.starts_with("no token: the auth URL gave status 401"), "{answered}");
}
