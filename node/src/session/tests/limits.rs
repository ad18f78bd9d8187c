use super::*;

fn array(id: &str, messages: usize) -> Value {
    json!({"op": 13, "id": id, "channel": "a", "messages": vec![json!({}); messages]})
}

#[test]
fn publishes_at_the_burst_and_one_past() {
    let mut client = SessionTestClient::key("all");
    for ticket in 1..=400 {
        assert_eq!(brief(&client.send(&publish("p", "a"))), [format!("publish {ticket}")]);
        client.acked(ticket);
    }
    let seen = client.send(&publish("over", "a"));
    let error = "more messages than the connection may publish";
    let nack = json!({"op": 2, "id": "over", "error": error, "code": 42900, "reason": "rate_limit"});
    assert_eq!(*frame(&seen), nack);
    client.clock.pass_to(NOW_MS + 4);
    assert_eq!(brief(&client.send(&publish("over", "a"))), ["2 over 42900"]);
    client.clock.pass_to(NOW_MS + 5);
    let seen = client.send(&publish("p", "a"));
    assert!(matches!(seen[..], [SessionEffect::Publish { .. }]), "200 a second: {seen:?}");
}

#[test]
fn each_message_of_an_array_counts() {
    let mut client = SessionTestClient::key("all");
    assert_eq!(brief(&client.send(&array("p", 399))), ["publish 1"]);
    client.acked(1);
    assert_eq!(brief(&client.send(&array("over", 2))), ["2 over 42900"]);
    let seen = client.send(&array("p", 1));
    assert!(matches!(seen[..], [SessionEffect::Publish { .. }]), "what was refused took nothing: {seen:?}");
    assert_eq!(brief(&SessionTestClient::key("all").send(&array("p", 400))), ["publish 1"]);
    assert_eq!(brief(&SessionTestClient::key("all").send(&array("over", 401))), ["2 over 42900"]);
}

#[test]
fn publish_refused_by_capability_does_not_count_against_rate() {
    let mut client = SessionTestClient::key("chat");
    for _ in 0..500 {
        assert_eq!(brief(&client.send(&publish("p", "other"))), ["2 p 40160"]);
    }
    let seen = client.send(&publish("p", "chat:a"));
    assert!(matches!(seen[..], [SessionEffect::Publish { .. }]), "{seen:?}");
}

#[test]
fn controls_at_the_burst_and_one_past() {
    let mut client = SessionTestClient::key("all");
    let auth = json!({"op": 15, "id": "au", "accessToken": "bad"});
    let presence = json!({"op": 12, "id": "pr", "channel": "a", "action": "enter"});
    for _ in 0..100 {
        for request in [attach("at", "a"), detach("de", "a"), auth.clone(), presence.clone()] {
            assert!(!brief(&client.send(&request)).concat().contains("42900"));
        }
    }
    let error = "more attach, detach, presence and auth frames than the connection may send";
    let nack = json!({"op": 2, "id": "at", "error": error, "code": 42900, "reason": "rate_limit"});
    assert_eq!(*frame(&client.send(&attach("at", "a"))), nack);
    assert_eq!(brief(&client.send(&detach("de", "a"))), ["2 de 42900"]);
    assert_eq!(brief(&client.send(&auth)), ["2 au 42900"]);
    assert_eq!(brief(&client.send(&presence)), ["2 pr 42900"]);
    assert_eq!(client.send(&json!({"op": 8, "channel": "a"})), [], "without an id it is only refused");
    assert_eq!(brief(&client.send(&json!({"op": 0, "id": "h"}))), ["0 h"], "a heartbeat is none");
    let seen = client.send(&publish("p", "b"));
    assert!(matches!(seen[..], [SessionEffect::Publish { .. }]), "nor is a publish: {seen:?}");
    client.clock.pass_to(NOW_MS + 19);
    assert_eq!(brief(&client.send(&attach("at", "a"))), ["2 at 42900"]);
    client.clock.pass_to(NOW_MS + 20);
    assert_eq!(brief(&client.send(&attach("at", "a"))), ["deliver a true", "9 at"], "50 a second");
}

#[test]
fn no_rate_refuses_nothing() {
    let mut client = SessionTestClient::limited(Limits {
        publishes_per_second: 0,
        controls_per_second: 0,
        ..Limits::default()
    });
    assert_eq!(brief(&client.send(&array("p", 5_000))), ["publish 1"]);
    for _ in 0..1_000 {
        assert_eq!(brief(&client.send(&detach("de", "b"))), ["11 de"]);
    }
}
