use super::*;

const HOUR_S: u64 = 3600;

fn refresh(token: &str) -> Value {
    json!({"op": 15, "id": "au", "accessToken": token})
}

fn everything() -> Value {
    json!({"*": ["subscribe", "publish", "presence"]})
}

fn expires_ms(seconds: u64) -> u64 {
    (NOW_S + seconds) * 1000
}

#[test]
fn accepted_refresh_token_is_acked_and_followed_by_connected() {
    let mut client = SessionTestClient::token(&token_of("all", &everything(), Some("ann"), HOUR_S));
    client.opened();
    let seen = client.send(&refresh(&token_of("all", &everything(), Some("ann"), 2 * HOUR_S)));
    assert_eq!(seen[0], SessionEffect::Frame(json!({"op": 1, "id": "au"})));
    let connected = frame(&seen[1..]);
    assert_eq!(connected["connectionId"], json!(client.session.connection_id().to_string()));
    assert_eq!(connected["resumed"], json!(true));
    assert_eq!(connected["expires"], json!(expires_ms(2 * HOUR_S)));
    assert_eq!(connected["clientId"], json!("ann"));
    assert_eq!(client.session.due_ms(), Some(expires_ms(2 * HOUR_S) - 30_000));
}

#[test]
fn a_token_must_keep_the_account_and_the_client_id() {
    let all = |client_id| token_of("all", &everything(), client_id, HOUR_S);
    let forced_ann = || SessionTestClient::token(&all(Some("ann")));
    let chosen_ann = || SessionTestClient::key_as("all", Some("ann"));
    let nobody = || SessionTestClient::key("all");
    let other = token_of("other", &json!({"*": ["publish"]}), None, HOUR_S);
    let forged = all(None) + "x";
    let narrow = json!({"chat:1": ["publish"]});
    let cases: [(&str, SessionTestClient, String, Option<Reason>); 12] = [
        ("forced, the same", forced_ann(), all(Some("ann")), None),
        ("forced, another", forced_ann(), all(Some("bob")), Some(Reason::OtherClientId)),
        ("forced, none", forced_ann(), all(None), Some(Reason::OtherClientId)),
        ("chosen, the same", chosen_ann(), all(Some("ann")), None),
        ("chosen, another", chosen_ann(), all(Some("bob")), Some(Reason::OtherClientId)),
        ("chosen, none", chosen_ann(), all(None), None),
        ("none, none", nobody(), all(None), None),
        ("none, some", nobody(), all(Some("ann")), Some(Reason::OtherClientId)),
        ("another account", nobody(), other, Some(Reason::OtherAccount)),
        ("another key of the account", nobody(), token_of("chat", &narrow, None, HOUR_S), None),
        ("a wrong signature", nobody(), forged, Some(Reason::BadSignature)),
        ("no token", nobody(), "x".to_owned(), Some(Reason::Malformed)),
    ];
    for (case, mut client, token, refused) in cases {
        let seen = client.send(&refresh(&token));
        let expected: &[&str] = if refused.is_none() { &["1 au", "3 "] } else { &["2 au 40140"] };
        assert_eq!(brief(&seen), expected, "{case}");
        assert_eq!(client.refused, Vec::from_iter(refused), "{case}");
    }
}

#[test]
fn chosen_client_id_stays_and_is_forced_by_token_naming_it() {
    let mut client = SessionTestClient::key_as("all", Some("ann"));
    let seen = client.send(&refresh(&token_of("all", &everything(), None, HOUR_S)));
    assert_eq!(frame(&seen[1..])["clientId"], json!("ann"));
    client.send(&refresh(&token_of("all", &everything(), Some("ann"), HOUR_S)));
    let seen = client.send(&refresh(&token_of("all", &everything(), None, HOUR_S)));
    assert_eq!(brief(&seen), ["2 au 40140"], "the former credential forced it");
}

#[test]
fn after_a_refusal_the_old_credential_stands() {
    let mut client = SessionTestClient::token(&token_of("all", &everything(), None, HOUR_S));
    client.send(&attach("at", "a"));
    let seen = client.send(&refresh(&token_of("other", &json!({"x": ["publish"]}), None, 2 * HOUR_S)));
    assert_eq!(brief(&seen), ["2 au 40140"]);
    assert_eq!(brief(&client.send(&publish("p", "a"))), ["publish 1"]);
    assert_eq!(client.session.due_ms(), Some(expires_ms(HOUR_S) - 30_000));
    assert_eq!(client.session.principal().account.id.as_str(), "acme");
}

#[test]
fn a_narrower_token_takes_what_it_does_not_grant() {
    let mut client = SessionTestClient::key("all");
    for channel in ["a", "b", "c", "d"] {
        client.send(&attach("at", channel));
    }
    let narrower = json!({
        "a": ["subscribe", "publish", "presence"], "b": ["publish"], "c": ["history"], "d": ["subscribe"],
    });
    let seen = client.send(&refresh(&token_of("all", &narrower, None, HOUR_S)));
    let taken = brief(&seen[2..]);
    let expected = ["deliver b false", "9 ", "11  40160", "detach c", "deliver d true", "9 "];
    assert_eq!(taken, expected, "nothing is said of a");
    let SessionEffect::Frame(attached) = &seen[3] else { panic!("{seen:?}") };
    assert_eq!(attached["modes"], json!(["publish"]));
    assert_eq!((&attached["resumed"], attached.get("id")), (&json!(true), None));
    let SessionEffect::Frame(detached) = &seen[4] else { panic!("{seen:?}") };
    assert_eq!(detached["channel"], json!("c"));
    assert!(detached["error"].is_string());
    assert_eq!(brief(&client.send(&publish("p", "c"))), ["2 p 40160"]);
    assert_eq!(brief(&client.send(&publish("p", "d"))), ["2 p 40160"]);
    let seen = client.send(&refresh(&token_of("all", &narrower, None, HOUR_S)));
    assert_eq!(brief(&seen), ["1 au", "3 "], "the same again changes nothing");
}

#[test]
fn waiting_requests_are_checked_against_refreshed_token() {
    let mut client = SessionTestClient::key("all");
    client.send(&publish("p", "a"));
    client.send(&attach("at", "a"));
    client.send(&publish("q", "a"));
    client.send(&refresh(&token_of("all", &json!({"b": ["publish"]}), None, HOUR_S)));
    assert_eq!(brief(&client.acked(1)), ["1 p", "2 at 40160", "2 q 40160"]);
}

#[test]
fn a_new_token_is_asked_for_30_s_before_the_old_one_expires() {
    let mut client = SessionTestClient::token(&token_of("all", &everything(), None, HOUR_S));
    assert_eq!(brief(&client.opened()), ["3 "]);
    let expires = expires_ms(HOUR_S);
    assert_eq!(client.session.due_ms(), Some(expires - 30_000));
    assert_eq!(client.tick_at(expires - 30_001), []);
    let seen = client.tick_at(expires - 30_000);
    assert_eq!(*frame(&seen), json!({"op": 15, "code": 40142, "expires": expires}));
    assert_eq!(client.session.due_ms(), Some(expires));
    assert_eq!(client.tick_at(expires - 1), [], "once");
}

#[test]
fn a_token_that_lives_shorter_is_asked_for_at_once() {
    for (seconds, is_requested) in [(30, true), (31, false)] {
        // The clock is half a second into the first of them.
        let mut client = SessionTestClient::token(&token_of("all", &everything(), None, seconds));
        let seen = client.opened();
        assert_eq!(brief(&seen).contains(&"15  40142".to_owned()), is_requested, "{seconds} s");
    }
    let mut client = SessionTestClient::token(&token_of("all", &everything(), None, HOUR_S));
    client.opened();
    let seen = client.send(&refresh(&token_of("all", &everything(), None, 10)));
    assert_eq!(brief(&seen), ["1 au", "3 ", "15  40142"], "after a refresh too");
}

#[test]
fn token_refresh_restarts_the_request_for_a_new_token() {
    let mut client = SessionTestClient::token(&token_of("all", &everything(), None, 40));
    client.opened();
    assert_eq!(brief(&client.tick_at(expires_ms(40) - 30_000)), ["15  40142"]);
    client.send(&refresh(&token_of("all", &everything(), None, 100)));
    assert_eq!(client.tick_at(expires_ms(40)), [], "the old expiry is none any more");
    assert_eq!(brief(&client.tick_at(expires_ms(100) - 30_000)), ["15  40142"]);
}

#[test]
fn client_is_asked_to_reconnect_and_closed_at_token_expiry() {
    let mut client = SessionTestClient::token(&token_of("all", &everything(), None, HOUR_S));
    client.opened();
    client.send(&publish("p", "a"));
    let seen = client.tick_at(expires_ms(HOUR_S));
    let error = "the token has expired";
    let disconnected = json!({"op": 4, "error": error, "code": 40142, "reconnectAfterMs": 0});
    assert_eq!(
        seen,
        [SessionEffect::Frame(disconnected), SessionEffect::End { code: 4001, after_ms: 1_000 }]
    );
    assert_eq!(client.send(&json!({"op": 0, "id": "h"})), []);
    assert_eq!(client.acked(1), []);
    assert_eq!(client.tick_at(expires_ms(HOUR_S) + 1), []);
}

#[test]
fn a_key_does_not_expire() {
    let mut client = SessionTestClient::key("all");
    assert_eq!(client.session.due_ms(), None);
    assert_eq!(client.tick_at(u64::MAX / 2), []);
}

#[test]
fn a_key_that_was_narrowed_takes_what_it_no_longer_grants() {
    let mut client = SessionTestClient::key("all");
    for channel in ["a", "chat:1", "chat:2"] {
        client.send(&attach("at", channel));
    }
    let narrower = SessionTestClient::key("chat").session.principal().clone();
    let seen = client.act(|session, _, out| session.renew(narrower.clone(), out));
    let expected = ["11  40160", "detach a", "deliver chat:1 true", "9 ", "deliver chat:2 true", "9 "];
    assert_eq!(brief(&seen), expected, "no presence on chat");
    assert_eq!(brief(&client.send(&publish("p", "a"))), ["2 p 40160"]);
    assert_eq!(brief(&client.send(&publish("p", "chat:1"))), ["publish 2"]);
    assert_eq!(client.act(|session, _, out| session.renew(narrower.clone(), out)), []);
}

#[test]
fn grant_change_outside_the_modes_is_recounted() {
    let mut client = SessionTestClient::key("chat");
    client.send(&json!({"op": 8, "id": "at", "channel": "chat:1", "modes": ["subscribe"]}));
    client.send(&attach("at", "chat:2"));
    let name = ChannelName::of("chat:1");
    assert!(client.session.publishes(&name));
    let reader = SessionTestClient::key("reader").session.principal().clone();
    let seen = client.act(|session, _, out| session.renew(reader.clone(), out));
    assert_eq!(brief(&seen), ["recount chat:1", "deliver chat:2 true", "9 "]);
    assert!(!client.session.publishes(&name));
    assert_eq!(client.act(|session, _, out| session.renew(reader.clone(), out)), []);
    let writer = SessionTestClient::key("chat").session.principal().clone();
    let seen = client.act(|session, _, out| session.renew(writer.clone(), out));
    assert_eq!(brief(&seen), ["recount chat:1", "recount chat:2"], "modes are not widened");
    assert!(client.session.publishes(&name) && !client.session.is_silent(&name));
}
