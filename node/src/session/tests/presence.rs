use super::*;

fn presence(id: &str, channel: &str, action: &str) -> Value {
    json!({"op": 12, "id": id, "channel": channel, "action": action})
}

fn named(id: &str, channel: &str, client_id: &str) -> Value {
    json!({"op": 12, "id": id, "channel": channel, "action": "enter", "clientId": client_id})
}

fn present(ticket: u64, client_id: &str, action: PresenceAction) -> SessionEffect {
    SessionEffect::Present { ticket, client_id: client_id.into(), action }
}

fn done(client: &mut SessionTestClient, ticket: u64) -> Vec<SessionEffect> {
    client.answered(ticket, PublishResult::Acked(Vec::new()))
}

#[test]
fn each_action_is_passed_on_and_acked_without_serials() {
    let mut client = SessionTestClient::key_as("all", Some("ann"));
    let actions = [PresenceAction::Enter, PresenceAction::Update, PresenceAction::Leave];
    for (ticket, action) in (1..).zip(actions) {
        let seen = client.send(&presence("p", "chat:1", action.as_str()));
        assert_eq!(seen, [present(ticket, "ann", action)]);
        assert_eq!(frame(&done(&mut client, ticket)), &json!({"op": 1, "id": "p"}));
    }
}

#[test]
fn a_forced_client_id_is_the_only_one() {
    let everything = json!({"*": ["presence"]});
    let mut client = SessionTestClient::token(&token_of("all", &everything, Some("ann"), 60));
    assert_eq!(client.send(&named("1", "a", "ann")), [present(1, "ann", PresenceAction::Enter)]);
    assert_eq!(client.send(&presence("2", "a", "enter")), [present(2, "ann", PresenceAction::Enter)]);
    assert_eq!(brief(&client.send(&named("3", "b", "bob"))), ["2 3 40160"]);
}

#[test]
fn unforced_presence_request_may_name_any_but_needs_client_id() {
    let mut client = SessionTestClient::key_as("all", Some("ann"));
    assert_eq!(client.send(&named("1", "a", "bob")), [present(1, "bob", PresenceAction::Enter)]);
    let mut nobody = SessionTestClient::key("all");
    assert_eq!(nobody.send(&named("1", "a", "bob")), [present(1, "bob", PresenceAction::Enter)]);
    assert_eq!(brief(&nobody.send(&presence("2", "b", "enter"))), ["2 2 40000"]);
}

#[test]
fn invalid_presence_request_is_refused_with_code() {
    let mut client = SessionTestClient::key_as("all", Some("ann"));
    let long = "x".repeat(257);
    for (request, code) in [
        (presence("1", "a", "join"), 40000),
        (presence("1", "[a", "enter"), 40003),
        (named("1", "a", "*"), 40000),
        (named("1", "a", ""), 40000),
        (named("1", "a", &long), 40000),
    ] {
        assert_eq!(brief(&client.send(&request)), [format!("2 1 {code}")], "{request}");
    }
    let mut without = SessionTestClient::key_as("chat", Some("ann"));
    assert_eq!(brief(&without.send(&presence("1", "chat:1", "enter"))), ["2 1 40160"]);
}

#[test]
fn answers_keep_the_order_of_the_requests_of_a_channel() {
    let mut client = SessionTestClient::key_as("all", Some("ann"));
    let requests = [
        publish("1", "a"),
        presence("2", "a", "enter"),
        presence("3", "a", "nothing"),
        detach("4", "a"),
        presence("5", "a", "leave"),
    ];
    assert_eq!(brief(&client.send_together(&requests)), ["publish 1", "present 2"]);
    assert_eq!(brief(&done(&mut client, 2)), Vec::<String>::new(), "the publish is not answered yet");
    assert_eq!(brief(&client.acked(1)), ["1 1", "1 2", "2 3 40000", "11 4", "present 4"]);
    assert_eq!(brief(&done(&mut client, 4)), ["1 5"]);
}

#[test]
fn presence_counts_against_the_rate_of_controls() {
    let mut client =
        SessionTestClient::limited(Limits { control_burst: 2, controls_per_second: 1, ..Limits::default() });
    for id in ["1", "2"] {
        assert_eq!(client.send(&named(id, "a", "ann")).len(), 1);
    }
    assert_eq!(brief(&client.send(&named("3", "a", "ann"))), Vec::<String>::new());
    done(&mut client, 1);
    assert_eq!(brief(&done(&mut client, 2)), ["1 2", "2 3 42900"]);
}

#[test]
fn members_leave_at_once_only_on_close_refusal_or_lost_grant() {
    let mut closed = SessionTestClient::key_as("all", Some("ann"));
    closed.send(&json!({"op": 5}));
    assert_eq!(closed.left, [LeaveScope::All]);

    let mut revoked = SessionTestClient::key_as("all", Some("ann"));
    revoked.act(|session, _, out| session.fail("unauthorized", 40100, 4001, out));
    assert_eq!(revoked.left, [LeaveScope::All]);

    let mut broken = SessionTestClient::key_as("all", Some("ann"));
    broken.act(|session, _, out| session.protocol_error("broken", out));
    assert_eq!(broken.left, []);

    let mut stopped = SessionTestClient::key_as("all", Some("ann"));
    stopped.act(|session, _, out| session.disconnect("stopping", 50003, 1012, 0, 0, out));
    assert_eq!(stopped.left, []);

    let all = json!({"*": ["subscribe", "presence"]});
    let mut narrowed = SessionTestClient::token(&token_of("all", &all, Some("ann"), 60));
    let less = token_of("all", &json!({"*": ["subscribe"]}), Some("ann"), 60);
    narrowed.send(&json!({"op": 15, "id": "t", "accessToken": less}));
    assert_eq!(narrowed.left, [LeaveScope::NotGranted]);
}
