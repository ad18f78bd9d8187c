use super::*;

#[test]
fn the_header_carries_the_whole_key_or_a_token() {
    let node = AuthFixture::new();
    let token = sign("k1", &claims());
    let accepted = [
        basic("s.e.c.k1"),
        basic("s.e.c.k1").replace("Basic", "basic"),
        basic("s.e.c.k1").replace("Basic ", "BASIC   "),
        format!("Bearer {token}"),
        format!("bearer {token}"),
    ];
    for value in &accepted {
        let principal = node.http(&[value]).expect(value);
        assert_eq!((&*principal.key_name, principal.account.id.as_str()), ("k1", "acme"));
    }
    let refused = [
        String::new(),
        "Basic".into(),
        "Basic ".into(),
        "Bearer".into(),
        "Bearer ".into(),
        basic("k1:s.e.c"),
        basic("s.e.c:k1"),
        basic("s.e.c.k1:"),
        basic("s.e.c"),
        basic("k1"),
        basic(".k1"),
        basic("s.e.c."),
        basic("s.e.x.k1"),
        basic("s.e.c.c.k1"),
        basic("S.E.C.k1"),
        basic("s.e.c.K1"),
        basic("s.e.c.k1\n"),
        basic("gone-secret.gone"),
        basic("a-secret-of-nobody.nobody"),
        "Basic s.e.c.k1".into(),
        "Basic !!!".into(),
        format!("Basic {}", STANDARD.encode([0xff, b'.', b'k', b'1'])),
        "Bearer s.e.c.k1".into(),
        format!("Digest {token}"),
        format!("Token {token}"),
        token.clone(),
        "s.e.c.k1".into(),
        format!("Basic {token}"),
        format!("Bearer{token}"),
    ];
    for value in &refused {
        assert_eq!(node.http(&[value]).err(), Some(Unauthorized), "{value}");
    }
    assert_eq!(node.http(&[]).err(), Some(Unauthorized));
    let not_text =
        Credentials { authorization: vec![b"Bearer \xff"], query: "", socket: false, address: None };
    assert_eq!(node.auth.authenticate(&not_text).err(), Some(Unauthorized));
}

#[test]
fn several_credentials_must_be_the_same_one() {
    let node = AuthFixture::new();
    let (one, other) = (
        sign("k1", &claims()),
        sign(
            "narrow",
            &json!({
                "iat": NOW_S, "exp": NOW_S + 60, "x-service-capability": r#"{"chat:a":["publish"]}"#
            }),
        ),
    );
    let (key, bearer) = (basic("s.e.c.k1"), format!("Bearer {one}"));
    assert!(node.http(&[&key, &key]).is_ok());
    assert!(node.http(&[&key, &bearer]).is_err(), "two credentials of one key still differ");
    assert!(node.http(&[&bearer, "Digest x"]).is_err());
    let cases = [
        (None, format!("accessToken={one}"), true),
        (None, format!("token={one}"), true),
        (None, "key=s.e.c.k1".to_owned(), true),
        (None, "key=s%2Ee.c.k1".to_owned(), true),
        (None, format!("echo=false&token={one}&accessToken={one}"), true),
        (None, format!("accessToken={one}&accessToken={other}"), false),
        (None, format!("accessToken={one}&token={other}"), false),
        (None, format!("accessToken={one}&key=s.e.c.k1"), false),
        (None, format!("accessToken={one}&token="), false),
        (None, "key=s.e.c.k1&key=narrow-secret.narrow".to_owned(), false),
        (None, "key=k1:s.e.c".to_owned(), false),
        (None, format!("access_token={one}"), false),
        (None, String::new(), false),
        (Some(&bearer), format!("accessToken={one}"), true),
        (Some(&bearer), format!("accessToken={other}"), false),
        (Some(&key), "key=s.e.c.k1".to_owned(), true),
        (Some(&key), "key=narrow-secret.narrow".to_owned(), false),
        (Some(&key), String::new(), true),
        (Some(&bearer), String::new(), true),
    ];
    for (header, query, accepted) in cases {
        let headers: Vec<&str> = header.into_iter().map(String::as_str).collect();
        assert_eq!(node.socket(&headers, &query).is_ok(), accepted, "{header:?} {query}");
    }
}

#[test]
fn the_query_counts_on_the_socket_only() {
    let node = AuthFixture::new();
    let query = format!("accessToken={}", sign("k1", &claims()));
    let http = Credentials { authorization: Vec::new(), query: &query, socket: false, address: None };
    assert!(node.auth.authenticate(&http).is_err());
    assert!(node.socket(&[], &query).is_ok());
}

#[test]
fn a_forced_client_id_cannot_be_exchanged_in_the_query() {
    let node = AuthFixture::new();
    let mut forced = claims();
    forced["x-service-client-id"] = json!("ada");
    let (forced, free) = (sign("k1", &forced), sign("k1", &claims()));
    let cases = [
        (format!("token={forced}"), Some("ada")),
        (format!("token={forced}&clientId=ada"), Some("ada")),
        (format!("token={forced}&clientId=%61da&clientId=bob"), Some("ada")),
        (format!("token={free}&clientId=bob"), None),
        ("key=s.e.c.k1&clientId=bob".to_owned(), None),
    ];
    for (query, client_id) in cases {
        let principal = node.socket(&[], &query).expect(&query);
        assert_eq!(principal.client_id.as_ref().map(|id| id.as_str()), client_id, "{query}");
    }
    for chosen in ["bob", "", "*", "ADA", "ada+", "ada%00"] {
        let query = format!("token={forced}&clientId={chosen}");
        assert_eq!(node.socket(&[], &query).err(), Some(Unauthorized), "{query}");
    }
}

#[test]
fn nothing_that_is_printed_holds_a_credential() {
    let node = AuthFixture::new();
    let token = sign("k1", &claims());
    let query = format!("accessToken={token}");
    let header = basic("s.e.c.k1");
    let authorization = vec![header.as_bytes()];
    let credentials = Credentials { authorization, query: &query, socket: true, address: None };
    let by_key = node.http(&[&header]).unwrap();
    let by_token = node.socket(&[], &query).unwrap();
    let printed = format!("{credentials:?} {by_key:?} {by_token:?} {Unauthorized}");
    for secret in ["s.e.c", &token, &header, &token[token.len() - 20..]] {
        assert!(!printed.contains(secret), "{secret} in {printed}");
    }
}
