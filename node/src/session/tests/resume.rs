use super::*;

const MISSED: Stamp = Stamp { incarnation: 1, sequence: 3 };

fn attach_after(id: &str, channel: &str, serial: &str) -> Value {
    json!({"op": 8, "id": id, "channel": channel, "serial": serial})
}

#[test]
fn an_attach_with_a_position_is_answered_when_it_is_looked_for() {
    let mut client = SessionTestClient::key("all");
    let seen = client.send(&attach_after("a", "chat:1", &serial(MISSED)));
    assert_eq!(brief(&seen), ["deliver chat:1 true"]);
    let (begin, reply) = client.looked_for.pop().unwrap();
    assert_eq!(begin, DeliveryStart::After(Serial::single(1, 3)));
    let attached = json!({
        "op": 9, "id": "a", "channel": "chat:1", "serial": serial(MISSED), "resumed": true,
        "presence": false, "modes": ["subscribe", "publish", "presence"],
    });
    assert_eq!(client.settle(&reply, MISSED, true), [SessionEffect::Frame(attached)]);
    assert_eq!(brief(&client.send(&detach("d", "chat:1"))), ["11 d", "detach chat:1"]);
}

#[test]
fn a_serial_that_cannot_be_read_is_no_position() {
    let long = format!("{}~{}", serial(MISSED), "x".repeat(512));
    for text in ["", "x", "~", "AAAAAAAB", "AAAAAAAB.01", &long] {
        let seen = SessionTestClient::key("all").send(&attach_after("a", "chat:1", text));
        let SessionEffect::Frame(attached) = &seen[1] else { panic!("{seen:?}") };
        assert_eq!((&attached["resumed"], &attached["serial"]), (&json!(false), &json!(serial(POSITION))));
    }
}

#[test]
fn requests_on_resuming_channel_wait_and_other_channels_proceed() {
    let mut client = SessionTestClient::key("all");
    let seen = client.send_together(&[
        attach_after("1", "a", &serial(MISSED)),
        detach("2", "a"),
        attach("3", "a"),
        attach("4", "b"),
    ]);
    assert_eq!(brief(&seen), ["deliver a true", "deliver b true", "9 4"]);
    let (_, reply) = client.looked_for.pop().unwrap();
    let seen = client.settle(&reply, MISSED, true);
    assert_eq!(brief(&seen), ["9 1", "11 2", "detach a", "deliver a true", "9 3"]);
}

#[test]
fn a_publish_goes_on_and_is_answered_behind_the_attach() {
    let mut client = SessionTestClient::key("all");
    let seen = client.send_together(&[attach_after("1", "a", &serial(MISSED)), publish("2", "a")]);
    assert_eq!(brief(&seen), ["deliver a true", "publish 2"]);
    assert!(client.acked(2).is_empty());
    let (_, reply) = client.looked_for.pop().unwrap();
    assert_eq!(brief(&client.settle(&reply, MISSED, true)), ["9 1", "1 2"]);
}

#[test]
fn an_attached_channel_replays_nothing() {
    let mut client = SessionTestClient::key("all");
    client.send(&attach("a", "a"));
    let seen = client.send(&attach_after("b", "a", &serial(MISSED)));
    let SessionEffect::Frame(attached) = &seen[1] else { panic!("{seen:?}") };
    assert_eq!((&attached["resumed"], &attached["serial"]), (&json!(true), &json!(serial(POSITION))));
}

#[test]
fn a_capability_that_is_narrowed_meanwhile_refuses_the_attach() {
    let all = json!({"a": ["subscribe"], "b": ["subscribe", "publish"]});
    let mut client = SessionTestClient::token(&token_of("all", &all, None, 3600));
    client.send(&attach_after("1", "a", &serial(MISSED)));
    client.send(&attach_after("2", "b", &serial(MISSED)));
    let less = token_of("all", &json!({"b": ["publish"]}), None, 3600);
    client.send(&json!({"op": 15, "id": "t", "accessToken": less}));
    let replies: Vec<_> = client.looked_for.drain(..).map(|(_, reply)| reply).collect();
    assert_eq!(brief(&client.settle(&replies[0], MISSED, true)), ["2 1 40160"]);
    let seen = client.settle(&replies[1], MISSED, true);
    assert_eq!(frame(&seen)["modes"], json!(["publish"]));
}

#[test]
fn continuity_loss_is_sent_only_for_attached_channels() {
    let mut client = SessionTestClient::key("all");
    client.send(&attach("a", "a"));
    let mut lose = |channel: &str| {
        let channel = ChannelName::of(channel);
        client.act(|session, _, out| session.continuity_lost(&channel, Serial::single(1, 9), false, out))
    };
    let expected = json!({
        "op": 9, "channel": "a", "serial": Serial::single(1, 9).to_string(), "resumed": false,
        "presence": false, "modes": ["subscribe", "publish", "presence"],
    });
    assert_eq!(lose("a"), [SessionEffect::Frame(expected)]);
    assert!(lose("b").is_empty());
}
