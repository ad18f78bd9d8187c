//! Invalid credentials: each gives the same 401.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::fixture::{HttpFixture, HttpTestRequest, key_string};

#[tokio::test]
async fn all_bad_credentials_look_alike() {
    let node = HttpFixture::new();
    let basic = |text: &str| format!("Basic {}", STANDARD.encode(text));
    let full = key_string("full");
    let (secret, name) = full.rsplit_once('.').unwrap();
    for authorization in [
        String::new(),
        "Basic".to_owned(),
        "Basic !!!".to_owned(),
        full.clone(),
        format!("Digest {}", STANDARD.encode(&full)),
        basic(&format!("{name}:{secret}")),
        basic(&format!("{secret}:{name}")),
        basic(&format!("wrong.{name}")),
        basic(&format!("{secret}.nobody")),
        basic(&key_string("revoked")),
        "Bearer abc".to_owned(),
        "Bearer a.b.c".to_owned(),
    ] {
        let sent = HttpTestRequest::new("GET", "/time").header("authorization", &authorization);
        let answer = node.send(sent).await;
        assert_eq!(
            (answer.status, answer.text.as_str()),
            (401, r#"{"error":"unauthorized"}"#),
            "{authorization}"
        );
    }
}

#[tokio::test]
async fn a_credential_in_the_query_is_none_over_http() {
    let node = HttpFixture::new();
    let answer = node.send(HttpTestRequest::new("GET", &format!("/time?key={}", key_string("full")))).await;
    assert_eq!(answer.status, 401);
}

#[tokio::test]
async fn two_different_credentials_are_none() {
    let node = HttpFixture::new();
    let answer = node.send(HttpTestRequest::new("GET", "/time").key("full").key("narrow")).await;
    assert_eq!(answer.status, 401);
}
