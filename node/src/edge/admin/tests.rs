use std::os::unix::fs::PermissionsExt as _;

use axum::body::Body;
use http_body_util::BodyExt as _;
use metrics_exporter_prometheus::PrometheusBuilder;

use super::*;

fn state(readiness: Readiness) -> (AdminState, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t"), "the-token\n").unwrap();
    let token = AdminToken::open(Some(&folder.path().join("t")), folder.path()).unwrap();
    let metrics = PrometheusBuilder::new().build_recorder().handle();
    (AdminState { metrics, token: Arc::new(token), readiness: Arc::new(move || readiness) }, folder)
}

async fn ask(readiness: Readiness, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
    let (state, _folder) = state(readiness);
    let mut request = axum::http::Request::get(path);
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
        (Readiness::Degraded, 200, "degraded"),
        (Readiness::Draining, 503, "draining"),
    ] {
        let expected = (status, format!(r#"{{"status":"{text}"}}"#));
        assert_eq!(ask(readiness, "/ready", &[]).await, expected);
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
        for path in ["/drain", "/nothing", "/metrics/", "/"] {
            assert_eq!(ask(Readiness::Ready, path, headers).await, unauthorized, "{path} {headers:?}");
        }
    }
    let (status, _) = ask(Readiness::Ready, "/nothing", &[("authorization", "bearer the-token")]).await;
    assert_eq!(status, 404);
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
    let made = AdminToken::open(None, &data_dir).unwrap();
    let text = std::fs::read_to_string(data_dir.join("admin-token")).unwrap();
    assert_eq!(text.trim().len(), 43);
    assert!(made.is(text.trim().as_bytes()));
    assert!(AdminToken::open(None, &data_dir).unwrap().is(text.trim().as_bytes()));
    let mode = std::fs::metadata(data_dir.join("admin-token")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(format!("{made:?}"), "AdminToken(…)");
}

#[test]
fn a_file_without_a_token_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("t");
    for text in ["", "\n", "two lines\n", "a\nb", "é"] {
        std::fs::write(&file, text).unwrap();
        let error = AdminToken::open(Some(&file), folder.path()).unwrap_err();
        assert!(matches!(error, AdminTokenError::Malformed { .. }), "{text:?}");
    }
    let error = AdminToken::open(Some(&folder.path().join("absent")), folder.path()).unwrap_err();
    assert!(matches!(error, AdminTokenError::Io { .. }));
    assert!(!folder.path().join("absent").exists());
}
