use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use http_body_util::BodyExt as _;
use metrics_exporter_prometheus::PrometheusBuilder;

use super::*;

fn state(readiness: Readiness, drain: impl Fn() + Send + Sync + 'static) -> (AdminState, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t"), "\u{feff}the-token \r\n").unwrap();
    let token = AdminToken::read(&folder.path().join("t")).unwrap();
    let handle = PrometheusBuilder::new().build_recorder().handle();
    let metrics = Arc::new(move || handle.render());
    let (readiness, members) = (Arc::new(move || readiness.clone()), Arc::new(|| Some(view())));
    let done = RebalanceReport { connections: 9, mean: 6, asked: 2 };
    let (token, drain) = (Arc::new(token), Arc::new(drain));
    let rebalance: Arc<dyn Fn() -> AdminFuture<RebalanceReport> + Send + Sync> =
        Arc::new(move || Box::pin(async move { done }));
    let outbox = Arc::new(|| None);
    let backup: Arc<dyn Fn() -> AdminFuture<Result<BackupStream, BackupRefusal>> + Send + Sync> =
        Arc::new(|| Box::pin(async { Err(BackupRefusal::Busy) }));
    (
        AdminState { metrics, token, queues: None, outbox, readiness, drain, members, backup, rebalance },
        folder,
    )
}

fn view() -> MembersView {
    let node = NodeView {
        node_id: "n0".to_owned(),
        incarnation: format!("{:016x}", 7),
        listen: "a.example:1".to_owned(),
        gossip: None,
        peer: Some("a.example:2".to_owned()),
        version: "0.1.0".to_owned(),
        protocol_minor: 3,
        ready: true,
        draining: false,
    };
    let other = NodeView { node_id: "n1".to_owned(), ..node.clone() };
    let left = MemberView { node: other, state: MemberState::Left, link_up: false, interest_known: true };
    MembersView { node, members: vec![left] }
}

async fn ask(readiness: Readiness, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
    call(state(readiness, || {}).0, "GET", path, headers).await
}

async fn call(state: AdminState, method: &str, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
    let mut request = axum::http::Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let service = hyper_util::service::TowerToHyperService::new(router(state));
    let request = request.body(Body::empty()).unwrap();
    let response = hyper::service::Service::call(&service, request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn open_paths_need_no_token() {
    assert_eq!(ask(Readiness::Ready, "/live", &[]).await, (200, "ok".to_owned()));
    assert_eq!(ask(Readiness::Ready, "/metrics", &[]).await.0, 200);
    for (readiness, status, text) in [
        (Readiness::Starting, 503, "starting"),
        (Readiness::Ready, 200, "ready"),
        (Readiness::Draining, 503, "draining"),
    ] {
        let expected = (status, format!(r#"{{"status":"{text}"}}"#));
        assert_eq!(ask(readiness, "/ready", &[]).await, expected);
    }
}

#[tokio::test]
async fn a_degraded_node_says_why() {
    for (reasons, text) in [
        (vec![Degradation::Store], r#"["store"]"#),
        (Degradation::ALL.to_vec(), r#"["store","clock","files","outbox","memory"]"#),
    ] {
        let expected = (200, format!(r#"{{"status":"degraded","reasons":{text}}}"#));
        assert_eq!(ask(Readiness::Degraded(reasons), "/ready", &[]).await, expected);
    }
}

#[tokio::test]
async fn everything_else_needs_the_token() {
    let unauthorized = (401, r#"{"error":"unauthorized"}"#.to_owned());
    let given: [&[(&str, &str)]; 6] = [
        &[],
        &[("authorization", "the-token")],
        &[("authorization", "Bearer the-toke")],
        &[("authorization", "Bearer the-token2")],
        &[("authorization", "Basic the-token")],
        &[("authorization", "Bearer the-token"), ("authorization", "Bearer the-token")],
    ];
    for headers in given {
        for path in ["/drain", "/debug/members", "/nothing", "/metrics/", "/"] {
            assert_eq!(ask(Readiness::Ready, path, headers).await, unauthorized, "{path} {headers:?}");
        }
    }
    let (status, _) = ask(Readiness::Ready, "/nothing", &[("authorization", "bearer the-token")]).await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn drain_can_be_requested_repeatedly() {
    let requests = Arc::new(AtomicUsize::new(0));
    let counting = Arc::clone(&requests);
    let (state, _folder) = state(Readiness::Ready, move || {
        counting.fetch_add(1, Ordering::Relaxed);
    });
    let token = [("authorization", "Bearer the-token")];
    for times in 1..=2 {
        let answer = call(state.clone(), "POST", "/drain", &token).await;
        assert_eq!(answer, (202, r#"{"status":"draining"}"#.to_owned()));
        assert_eq!(requests.load(Ordering::Relaxed), times);
    }
    assert_eq!(call(state.clone(), "GET", "/drain", &token).await.0, 405);
    let answer = call(state.clone(), "POST", "/rebalance", &token).await;
    assert_eq!(answer, (200, r#"{"connections":9,"mean":6,"asked":2}"#.to_owned()));
    assert_eq!(call(state.clone(), "POST", "/drain", &[]).await.0, 401);
    assert_eq!(requests.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn debug_members_lists_each_member_with_its_facts() {
    let (_, body) = ask(Readiness::Ready, "/debug/members", &[("authorization", "Bearer the-token")]).await;
    let own = r#""incarnation":"0000000000000007","listen":"a.example:1","peer":"a.example:2","version":"0.1.0","protocolMinor":3,"ready":true,"draining":false"#;
    let others = r#""state":"left","linkUp":false,"interestKnown":true"#;
    let expected =
        format!(r#"{{"node":{{"nodeId":"n0",{own}}},"members":[{{"nodeId":"n1",{own},{others}}}]}}"#);
    assert_eq!(body, expected);
}

#[tokio::test]
async fn a_foreign_origin_is_refused() {
    let host = ("host", "127.0.0.1:8081");
    for origin in ["http://evil.example", "null", "http://127.0.0.1:80", "127.0.0.1:8081", ""] {
        let headers = [host, ("origin", origin), ("authorization", "Bearer the-token")];
        for path in ["/live", "/ready", "/nothing"] {
            assert_eq!(ask(Readiness::Ready, path, &headers).await.0, 403, "{origin}");
        }
    }
    assert_eq!(ask(Readiness::Ready, "/live", &[host, ("origin", "http://127.0.0.1:8081")]).await.0, 200);
    assert_eq!(ask(Readiness::Ready, "/live", &[("origin", "http://127.0.0.1:8081")]).await.0, 403);
}

#[test]
fn a_token_is_made_once_and_private() {
    let folder = tempfile::tempdir().unwrap();
    let data_dir = folder.path().join("data");
    std::fs::create_dir(&data_dir).unwrap();
    let made = AdminToken::made_in(&data_dir).unwrap();
    let text = std::fs::read_to_string(data_dir.join("admin-token")).unwrap();
    assert_eq!(text.trim().len(), 43);
    assert!(made.is(text.trim().as_bytes()));
    assert!(AdminToken::made_in(&data_dir).unwrap().is(text.trim().as_bytes()));
    let mode = std::fs::metadata(data_dir.join("admin-token")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(format!("{made:?}"), "AdminToken(…)");
}

#[test]
fn a_file_without_a_token_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("t");
    for text in ["", "\n", "two lines\n", "a\nb", "é", "\"quoted\"\n", "'quoted'"] {
        std::fs::write(&file, text).unwrap();
        let error = AdminToken::read(&file).unwrap_err();
        assert!(matches!(error, AdminTokenError::Malformed { .. }), "{text:?}");
    }
    let error = AdminToken::read(&folder.path().join("absent")).unwrap_err();
    assert!(matches!(error, AdminTokenError::Unreadable { .. }));
    assert!(!folder.path().join("absent").exists());
}
