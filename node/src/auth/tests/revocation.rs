use super::*;
use crate::model::ClientId;

const CLIENT: &str = "x-service-client-id";
/// Longest lifetime of a token plus the tolerance for a signer's clock.
const KEPT_MS: u64 = 48 * 3_600_000 + 120_000;

impl AuthFixture {
    fn key(&self) -> Principal {
        self.http(&[&basic("s.e.c.k1")]).unwrap()
    }

    async fn revoke(&self, body: &Value) -> Result<(), RevokeError> {
        self.auth.revoke_tokens(&self.key(), "k1", body.to_string().as_bytes()).await.map(|_| ())
    }

    fn takes(&self, iat: u64, client_id: Option<&str>) -> bool {
        let mut claims = json!({ "iat": iat, "exp": iat + 3600, "x-service-capability": PUBLISH });
        if let Some(client_id) = client_id {
            claims[CLIENT] = json!(client_id);
        }
        self.auth.authenticate_token(&sign("k1", &claims)).is_ok()
    }

    async fn exchanged(&self, nonce: u32, client_id: &str) -> String {
        let body = json!({
            "keyName": "k1", "timestamp": self.clock.now_ms(), "nonce": format!("0123456789abcdef{nonce}"),
            "clientId": client_id,
        });
        let authorization = basic("s.e.c.k1");
        let headers = [authorization.as_bytes()];
        self.auth.exchange(None, "k1", &headers, body.to_string().as_bytes()).await.unwrap().token
    }
}

#[tokio::test]
async fn without_a_moment_all_tokens_until_now_are_refused() {
    let node = AuthFixture::new();
    let live = node.auth.authenticate_token(&sign("k1", &claims())).unwrap();
    let generation = node.auth.generation();
    node.revoke(&json!({})).await.unwrap();
    assert!(!node.takes(NOW_S - 10, None) && !node.takes(NOW_S - 10, Some("ann")));
    assert!(!node.takes(NOW_S, None), "of the same second, before or after: nobody can tell");
    assert!(node.takes(NOW_S + 1, None));
    assert!(node.auth.review(&live).is_none() && node.auth.generation() != generation);
    assert!(node.auth.review(&node.key()).is_some(), "the key itself is not taken back");
    let kept = node.tokens.kept.lock().clone();
    assert_eq!(kept, [Revocation { key_name: "k1".into(), client_id: None, issued_before_ms: NOW_MS }]);
}

#[tokio::test]
async fn a_client_id_ends_for_itself() {
    let node = AuthFixture::new();
    node.revoke(&json!({"clientId": "ann", "issuedBefore": NOW_MS - 5_000})).await.unwrap();
    assert!(!node.takes(NOW_S - 6, Some("ann")));
    assert!(node.takes(NOW_S - 4, Some("ann")), "issued after the moment");
    assert!(node.takes(NOW_S - 6, Some("bob")) && node.takes(NOW_S - 6, None));
    node.revoke(&json!({"clientId": "ann", "issuedBefore": NOW_MS - 9_000})).await.unwrap();
    assert!(!node.takes(NOW_S - 6, Some("ann")), "the later one stays");
    node.revoke(&json!({"clientId": "ann", "issuedBefore": NOW_MS - 1_000})).await.unwrap();
    assert!(!node.takes(NOW_S - 4, Some("ann")));
}

#[tokio::test]
async fn revocation_is_restored_at_start_and_ends_with_token_lifetime() {
    let node = AuthFixture::new();
    node.revoke(&json!({"clientId": "ann"})).await.unwrap();
    let again = AuthFixture::new();
    assert!(again.takes(NOW_S, Some("ann")));
    again.auth.restore_revocations(&node.tokens.kept.lock());
    assert!(!again.takes(NOW_S, Some("ann")) && again.takes(NOW_S, Some("bob")));
    again.clock.pass_to(NOW_MS + KEPT_MS - 1);
    again.auth.forget_ended_revocations();
    assert_eq!(again.auth.revocations.before_ms(&"k1".into(), Some(&ClientId::of("ann"))), NOW_MS);
    again.clock.pass_to(NOW_MS + KEPT_MS);
    again.auth.forget_ended_revocations();
    assert_eq!(again.auth.revocations.before_ms(&"k1".into(), Some(&ClientId::of("ann"))), 0);
    again.revoke(&json!({"issuedBefore": NOW_MS})).await.unwrap();
    assert!(again.tokens.kept.lock().is_empty(), "no token is so old, so nothing is kept");
}

#[tokio::test]
async fn a_token_issued_in_the_second_of_a_revocation_is_good() {
    let node = AuthFixture::new();
    let before = node.exchanged(1, "ann").await;
    for (body, nonce) in [(json!({}), 2), (json!({"clientId": "ann", "issuedBefore": NOW_MS + 119_000}), 3)] {
        node.revoke(&body).await.unwrap();
        assert!(node.auth.authenticate_token(&before).is_err());
        assert!(node.auth.authenticate_token(&node.exchanged(nonce, "ann").await).is_ok(), "{body}");
    }
}

#[tokio::test]
async fn only_the_key_itself_revokes() {
    let node = AuthFixture::new();
    let token = node.auth.authenticate_token(&sign("k1", &claims())).unwrap();
    let other = node.http(&[&basic("narrow-secret.narrow")]).unwrap();
    for (principal, path) in
        [(&token, "k1"), (&other, "k1"), (&node.key(), "narrow"), (&node.key(), "nobody")]
    {
        let refused = node.auth.revoke_tokens(principal, path, b"{}").await;
        assert_eq!(refused, Err(RevokeError::NotTheKey), "{path}");
    }
    let anonymous = AuthFixture::with(false);
    let principal = anonymous.http(&[]).unwrap();
    let refused = anonymous.auth.revoke_tokens(&principal, "anonymous", b"{}").await;
    assert_eq!(refused, Err(RevokeError::NotTheKey));
    assert!(node.takes(NOW_S, None) && node.tokens.kept.lock().is_empty());
}

#[tokio::test]
async fn a_malformed_body_revokes_nothing() {
    let node = AuthFixture::new();
    let bodies = [
        "",
        "[]",
        "\"k1\"",
        "{",
        r#"{"clientID":"ann"}"#,
        r#"{"clientId":null}"#,
        r#"{"clientId":""}"#,
        r#"{"clientId":"*"}"#,
        r#"{"clientId":7}"#,
        r#"{"clientId":"a\n"}"#,
        r#"{"clientId":"a","clientId":"b"}"#,
        r#"{"issuedBefore":null}"#,
        r#"{"issuedBefore":"1"}"#,
        r#"{"issuedBefore":1.0}"#,
        r#"{"issuedBefore":1e3}"#,
        r#"{"issuedBefore":-1}"#,
        r#"{"issuedBefore":18446744073709551616}"#,
        r#"{"issuedBefore":18446744073709551615}"#,
        &format!(r#"{{"issuedBefore":{}}}"#, NOW_MS + 119_001),
    ];
    for body in bodies {
        let refused = node.auth.revoke_tokens(&node.key(), "k1", body.as_bytes()).await;
        assert!(matches!(refused, Err(RevokeError::Malformed(_))), "{body}: {refused:?}");
    }
    assert!(node.takes(NOW_S - 100, Some("ann")) && node.tokens.kept.lock().is_empty());
}

#[tokio::test]
async fn client_ids_are_bounded_and_the_whole_key_makes_room() {
    let limits = Limits { revoked_client_ids: 2, ..Limits::default() };
    let node = AuthFixture::limited(&limits);
    let revoke = async |client_id: &str| node.revoke(&json!({"clientId": client_id})).await;
    revoke("ann").await.unwrap();
    revoke("bob").await.unwrap();
    assert_eq!(revoke("eve").await, Err(RevokeError::TooManyClientIds { client_ids_max: 2 }));
    assert!(node.takes(NOW_S, Some("eve")), "what was refused is not done");
    revoke("ann").await.unwrap();
    node.revoke(&json!({})).await.unwrap();
    node.clock.pass_to(NOW_MS + 1);
    revoke("eve").await.unwrap();
    revoke("ann").await.unwrap();
    assert!(revoke("bob").await.is_err());
    node.clock.pass_to(NOW_MS + KEPT_MS + 1);
    revoke("bob").await.unwrap();
}

#[tokio::test]
async fn revocation_without_store_fails_but_tokens_are_refused() {
    let node = AuthFixture::new();
    node.tokens.down.store(true, Ordering::Relaxed);
    assert_eq!(node.revoke(&json!({})).await, Err(RevokeError::Unavailable));
    assert!(!node.takes(NOW_S, None));
}
