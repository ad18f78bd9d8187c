//! HTTP side of a node over a directory and a store in a temporary folder, and requests of tests.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::BodyExt as _;
use tempfile::TempDir;
use tower::ServiceExt as _;

use crate::accounts::Accounts;
use crate::auth::{Authenticator, NonceClaim, RevocationWrite, TokenStore, TokenStoreError};
use crate::edge::ApiServices;
use crate::edge::files::ClientFiles;
use crate::edge::http::router;
use crate::edge::socket::Shards;
use crate::hub::Hub;
use crate::model::{Clock, Limits, Nonce, Revocation};
use crate::origin::history::{EmbeddedOptions, EmbeddedStore, HistoryStore};
use crate::origin::metering::Meter;
use crate::publish::Publisher;
use crate::testing::DirectoryText;

pub(super) const NOW_MS: u64 = 1_767_225_600_000;

/// All operations that a key can have.
const FULL: &str = r#"{ "*" = ["subscribe", "publish", "presence", "history", "amqp-subscribe"] }"#;

fn directory() -> DirectoryText {
    DirectoryText::default()
        .account("acme")
        .channels("off:*", "history = false")
        .channels("short:*", "retention_hours = 1")
        .key("full", FULL)
        .key_with("narrow", &secret("narrow"), "active", r#"{ "chat:*" = ["publish", "subscribe"] }"#)
        .revoked_key("revoked")
        .account("other")
        .key("other", r#"{ "*" = ["publish", "history"] }"#)
}

/// `<secret>.<keyName>` as in the directory.
pub(super) fn key_string(name: &str) -> String {
    format!("{}.{name}", secret(name))
}

pub(super) fn secret(name: &str) -> String {
    if name == "narrow" { "secret.of-narrow".to_owned() } else { format!("secret-of-{name}") }
}

pub(super) struct HttpFixture {
    pub(super) services: Arc<ApiServices>,
    router: Router,
    _folder: TempDir,
}

impl HttpFixture {
    pub(super) fn new() -> Self {
        Self::with(Limits::default())
    }

    pub(super) fn with(limits: Limits) -> Self {
        let folder = TempDir::new().unwrap();
        let clock = Clock::manual(NOW_MS);
        let options = EmbeddedOptions::new(true, &limits);
        let store = EmbeddedStore::open(&folder.path().join("store"), &options, clock.clone()).unwrap();
        Self::build(folder, limits, clock, Arc::new(store), 0)
    }

    pub(super) fn over(store: impl HistoryStore) -> Self {
        Self::build(TempDir::new().unwrap(), Limits::default(), Clock::manual(NOW_MS), Arc::new(store), 0)
    }

    /// A node whose shard never answers.
    pub(super) fn with_a_stuck_shard() -> Self {
        let (folder, clock, limits) = (TempDir::new().unwrap(), Clock::manual(NOW_MS), Limits::default());
        let options = EmbeddedOptions::new(false, &limits);
        let store = EmbeddedStore::open(&folder.path().join("store"), &options, clock.clone()).unwrap();
        Self::build(folder, limits, clock, Arc::new(store), 1)
    }

    fn build(
        folder: TempDir,
        limits: Limits,
        clock: Clock,
        store: Arc<dyn HistoryStore>,
        shards: usize,
    ) -> Self {
        let file = folder.path().join("directory.toml");
        std::fs::write(&file, directory().text()).unwrap();
        let accounts = Accounts::open(&file, 72).unwrap();
        let limits = Arc::new(limits);
        let hub = Arc::new(Hub::new(Vec::new(), clock.clone(), &Limits::default()));
        let node_id: Arc<str> = "node-1".into();
        let meter = Meter::new(
            Arc::clone(&accounts),
            Arc::clone(&store),
            clock.clone(),
            Arc::clone(&node_id),
            limits.metric_minutes,
        );
        let services = Arc::new(ApiServices {
            meter: Arc::new(meter),
            auth: Arc::new(Authenticator::new(
                Arc::clone(&accounts),
                HttpTestTokenStore(Arc::clone(&store)),
                clock.clone(),
                &limits,
                true,
            )),
            publisher: Arc::new(Publisher::new(&hub, &store, &limits, None)),
            hub,
            earlier_incarnations: Vec::new(),
            accounts,
            store,
            connections: Arc::default(),
            queues: None,
            shards: Arc::new(Shards::prepare(shards).unwrap().0),
            files: Arc::new(ClientFiles::within(1 << 20, &limits)),
            limits,
            clock,
            node_id,
        });
        Self { router: router(Arc::clone(&services)), services, _folder: folder }
    }

    pub(super) async fn send(&self, sent: HttpTestRequest) -> HttpTestResponse {
        HttpTestResponse::read(self.respond(sent).await).await
    }

    /// Response with a body that is not read yet.
    pub(super) async fn respond(&self, sent: HttpTestRequest) -> Response<Body> {
        let mut request = Request::builder().method(sent.method.as_str()).uri(&sent.path);
        for (name, value) in &sent.headers {
            request = request.header(name, value);
        }
        let request = request.body(Body::from(sent.body)).unwrap();
        self.router.clone().oneshot(request).await.unwrap()
    }
}

struct HttpTestTokenStore(Arc<dyn HistoryStore>);

impl TokenStore for HttpTestTokenStore {
    fn claim_nonce(&self, nonce: Nonce) -> NonceClaim {
        let claim = self.0.claim_nonce(nonce);
        Box::pin(async { claim.await.map_err(|_| TokenStoreError) })
    }

    fn keep_revocation(&self, revocation: Revocation) -> RevocationWrite {
        let kept = self.0.revoke_tokens(revocation);
        Box::pin(async { kept.await.map_err(|_| TokenStoreError) })
    }
}

/// Builder of a request.
pub(super) struct HttpTestRequest {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: String,
}

impl HttpTestRequest {
    pub(super) fn new(method: &str, path: &str) -> Self {
        Self { method: method.into(), path: path.into(), headers: Vec::new(), body: String::new() }
    }

    /// Authenticates with a key of the directory, by Basic.
    pub(super) fn key(self, name: &str) -> Self {
        let value = format!("Basic {}", STANDARD.encode(key_string(name)));
        self.header("authorization", &value)
    }

    pub(super) fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub(super) fn body(mut self, text: &str) -> Self {
        self.body = text.into();
        self
    }
}

#[derive(Debug)]
pub(super) struct HttpTestResponse {
    pub(super) status: u16,
    headers: axum::http::HeaderMap,
    pub(super) text: String,
}

impl HttpTestResponse {
    async fn read(response: Response<Body>) -> Self {
        let (head, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        Self {
            status: head.status.as_u16(),
            headers: head.headers,
            text: String::from_utf8(bytes.to_vec()).unwrap(),
        }
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(super) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("not JSON: {}", self.text))
    }
}
