//! Tokens from the application, against an auth URL and a node that answer in every way.

use std::time::{Duration, Instant};

use super::*;
use crate::sign::{TokenParams, TokenRequest, token_request};
use crate::{AuthMethod, AuthUrl, Reconnect, TokenAnswer, TokenDetails, TokenSource};

fn options_with(addr: SocketAddr, source: TokenSource) -> Options {
    let reconnect = Reconnect { delay_min: Duration::from_millis(5), delay_max: Duration::from_millis(20) };
    let options = Options::new(format!("ws://{addr}"), Credential::TokensFrom(source));
    Options { reconnect: Some(reconnect), client_id: Some("a&b".into()), ..options }
}

fn auth_url(addr: SocketAddr) -> AuthUrl {
    AuthUrl::new(format!("http://{addr}/token?x=1"))
}

fn signed() -> TokenRequest {
    let key = "secret.k1".parse().expect("a key");
    token_request(&key, TokenParams { ttl_ms: Some(2_000), ..TokenParams::default() }).expect("a request")
}

/// Takes one HTTP request, and answers it.
async fn answer(listener: &TcpListener, status: &str, body: &str) -> String {
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let mut request = String::new();
    loop {
        let length = request.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length = length.map_or(0, |length| length.parse().expect("a number"));
        if request.split_once("\r\n\r\n").is_some_and(|(_, body)| body.len() >= length) {
            break;
        }
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).await.expect("a request");
        assert!(count > 0, "{request}");
        request.push_str(std::str::from_utf8(&bytes[..count]).expect("UTF-8"));
    }
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.expect("written");
    request
}

async fn upgraded(listener: &TcpListener, token: &str) -> Server {
    let (mut server, request) = Server::accept_with_request(listener).await;
    assert!(request.contains(&format!("authorization: Bearer {token}\r\n")), "{token}: {request}");
    server.say(&connected("k", true)).await;
    server
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.expect("it is there soon")
}

#[tokio::test]
async fn auth_url_is_requested_again_for_each_connection() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let asked = answer(&listener, "200 OK", "t1\n").await;
        assert!(asked.starts_with("GET /token?x=1&clientId=a%26b&role=reader%20 HTTP/1.1\r\n"), "{asked}");
        assert!(asked.contains("x-user: ann\r\n"), "{asked}");
        drop(upgraded(&listener, "t1").await);
        answer(&listener, "200 OK", r#""t2""#).await;
        let mut server = upgraded(&listener, "t2").await;
        server.say(&json!({"op": 15, "code": 40142, "expires": 60_000})).await;
        answer(&listener, "201 Created", r#"{"token":"t3"}"#).await;
        assert_eq!(server.hear().await["accessToken"], "t3");
        drop(server);
        answer(&listener, "200 OK", &serde_json::to_string(&signed()).expect("JSON")).await;
        let exchange = answer(&listener, "201 Created", r#"{"token":"t4","keyName":"k1"}"#).await;
        assert!(exchange.starts_with("POST /keys/k1/requestToken HTTP/1.1\r\n"), "{exchange}");
        assert!(exchange.contains(r#""ttl":2000"#) && exchange.contains(r#""mac":""#), "{exchange}");
        drop(upgraded(&listener, "t4").await);
    });
    let mut url = auth_url(addr);
    url.params.push(("role".into(), "reader ".into()));
    url.headers.push(("X-User".into(), "ann".into()));
    let client = Client::connect(options_with(addr, TokenSource::auth_url(url))).await.expect("connected");
    soon(tasks.join_all()).await;
    drop(client);
}

#[tokio::test]
async fn a_posted_auth_url_gets_its_parameters_as_json() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let asked = answer(&listener, "200 OK", "t1").await;
        assert!(asked.starts_with("POST /token?x=1 HTTP/1.1\r\n"), "{asked}");
        assert!(asked.contains("content-type: application/json\r\n"), "{asked}");
        assert!(asked.ends_with("\r\n\r\n{\"clientId\":\"a&b\"}"), "{asked}");
        upgraded(&listener, "t1").await
    });
    let url = AuthUrl { method: AuthMethod::Post, ..auth_url(addr) };
    Client::connect(options_with(addr, TokenSource::auth_url(url))).await.expect("connected");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn a_function_may_give_any_kind_of_answer() {
    let details = TokenDetails {
        token: "t2".into(),
        key_name: "k1".into(),
        issued: 1,
        expires: 2,
        capability: "{}".into(),
        client_id: None,
    };
    let kinds: [(TokenAnswer, &str); 3] =
        [("t1".to_owned().into(), "t1"), (details.into(), "t2"), (signed().into(), "t3")];
    for (kind, token) in kinds {
        let (listener, addr) = listen().await;
        let source = TokenSource::new(move || {
            let kind = kind.clone();
            async { Ok(kind) }
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            if token == "t3" {
                answer(&listener, "200 OK", r#"{"token":"t3"}"#).await;
            }
            upgraded(&listener, token).await
        });
        Client::connect(options_with(addr, source)).await.expect("connected");
        soon(tasks.join_all()).await;
    }
}

#[tokio::test]
async fn a_reconnect_outlives_failed_answers_and_ends_by_403() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        answer(&listener, "200 OK", "t1").await;
        drop(upgraded(&listener, "t1").await);
        for (status, body) in [("503 -", ""), ("401 -", ""), ("200 OK", "<html>\n"), ("200 OK", "{}")] {
            answer(&listener, status, body).await;
        }
        answer(&listener, "200 OK", "t2").await;
        drop(upgraded(&listener, "t2").await);
        answer(&listener, "403 Forbidden", &"x".repeat(100_000)).await;
    });
    let source = TokenSource::auth_url(auth_url(addr));
    let mut client = Client::connect(options_with(addr, source)).await.expect("connected");
    let ending = loop {
        match soon(client.next()).await.expect("an event") {
            Event::Connected(_) | Event::Disconnected { .. } => {}
            Event::Ended(ending) => break ending,
            other => unreachable!("{other:?}"),
        }
    };
    assert!(matches!(ending, Ending::Refused { code: 40_300, .. }), "{ending:?}");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn denied_refresh_is_reported_and_the_connection_goes_on() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        answer(&listener, "200 OK", "t1").await;
        let mut server = upgraded(&listener, "t1").await;
        server.say(&json!({"op": 15, "code": 40142, "expires": 60_000})).await;
        answer(&listener, "403 Forbidden", r#"{"error":"gone"}"#).await;
        assert_eq!(server.hear().await, json!({"op": 5}));
        server.say(&json!({"op": 6})).await;
    });
    let source = TokenSource::auth_url(auth_url(addr));
    let mut client = Client::connect(options_with(addr, source)).await.expect("connected");
    let Some(Event::AuthRequired { expires: Some(60_000), error: Some(error) }) = soon(client.next()).await
    else {
        unreachable!("the refresh failed")
    };
    assert_eq!(error, "no token is given to this client: gone");
    client.close().await.expect("closed");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn a_function_may_deny_a_token_for_good() {
    let source = TokenSource::new(|| async { Err::<String, _>(Error::TokenDenied("gone".into()).into()) });
    let denied = Client::connect(options_with(([127, 0, 0, 1], 1).into(), source)).await;
    let denied = denied.err().expect("denied");
    assert!(denied.is_final() && matches!(denied, Error::TokenDenied(_)), "{denied}");
}

#[tokio::test]
async fn a_token_refused_when_fresh_is_replaced_once() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        for token in ["t1", "t2"] {
            answer(&listener, "200 OK", token).await;
            answer(&listener, "401 Unauthorized", r#"{"error":"no"}"#).await;
        }
    });
    let source = TokenSource::auth_url(auth_url(addr));
    let refused = Client::connect(options_with(addr, source)).await.err().expect("refused");
    assert!(matches!(refused, Error::Http { status: 401, .. }), "{refused}");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn an_answer_beyond_its_bound_is_an_error_that_says_so() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        answer(&listener, "200 OK", &"x".repeat(64 * 1024 + 1)).await;
        let begun = Instant::now();
        let (stream, _) = listener.accept().await.expect("a connection");
        (begun, stream)
    });
    let options = || options_with(addr, TokenSource::auth_url(auth_url(addr)));
    let error = soon(Client::connect(options())).await.err().expect("too long").to_string();
    assert_eq!(error, "no token: the auth URL: unexpected answer: more than 65536 bytes");
    let error = soon(Client::connect(options())).await.err().expect("too late").to_string();
    assert_eq!(error, "no token: the auth URL: timed out");
    let (begun, _stream) = soon(tasks.join_next()).await.expect("a server").expect("it ends well");
    assert!(begun.elapsed() >= Duration::from_secs(9), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_failed_exchange_names_its_fault() {
    for (status, body, expected) in [
        (
            "401 -",
            r#"{"error":"invalid token request mac"}"#,
            "no token: the exchange of the TokenRequest gave status 401: invalid token request mac",
        ),
        ("403 -", r#"{"error":"beyond k1"}"#, "no token is given to this client: beyond k1"),
        ("200 -", "[]", "no token: the node's answer is not TokenDetails: "),
        (
            "200 -",
            r#"{"token":"a b"}"#,
            "no token: the answer is neither a JWT, TokenDetails nor a TokenRequest",
        ),
    ] {
        let (listener, addr) = listen().await;
        let source = TokenSource::new(|| async { Ok(signed()) });
        let (error, _) =
            tokio::join!(Client::connect(options_with(addr, source)), answer(&listener, status, body));
        let error = error.err().expect("no token").to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[tokio::test]
async fn wrong_settings_of_an_auth_url_are_final() {
    let with = |name: &str, value: &str| {
        let mut url = AuthUrl::new("http://127.0.0.1:1");
        url.headers.push((name.into(), value.into()));
        url
    };
    for url in [AuthUrl::new("ftp://app"), AuthUrl::new(""), with("a b", "c"), with("a", "c\r\nd: e")] {
        let source = TokenSource::auth_url(url);
        let error = Client::connect(options_with(([127, 0, 0, 1], 1).into(), source)).await;
        assert!(error.err().expect("refused").is_final());
    }
    let source = TokenSource::auth_url(AuthUrl::new("http://127.0.0.1:1/?secret"));
    let error = Client::connect(options_with(([127, 0, 0, 1], 1).into(), source)).await;
    let error = error.err().expect("nobody listens").to_string();
    assert!(error.starts_with("no token: the auth URL: cannot connect to 127.0.0.1:1: "), "{error}");
    assert!(!format!("{:?}", with("cookie", "secret")).contains("secret"));
}
