use super::*;

fn modes_of(seen: &[SessionEffect]) -> Vec<String> {
    let attached = seen.iter().find_map(|seen| match seen {
        SessionEffect::Frame(frame) if frame["op"] == 9 => Some(frame),
        _ => None,
    });
    let modes = attached.expect("an op 9")["modes"].as_array().unwrap();
    modes.iter().map(|mode| mode.as_str().unwrap().to_owned()).collect()
}

fn with_modes(channel: &str, modes: &[&str]) -> Value {
    json!({"op": 8, "id": "a", "channel": channel, "modes": modes})
}

#[test]
fn attached_gives_the_position_and_what_is_asked_and_granted() {
    let mut client = SessionTestClient::key("all");
    let seen = client.send(&attach("a", "chat:1"));
    let attached = json!({
        "op": 9, "id": "a", "channel": "chat:1", "serial": serial(POSITION), "resumed": false,
        "presence": false, "modes": ["subscribe", "publish", "presence"],
    });
    assert_eq!(seen, [SessionEffect::Deliver("chat:1".into(), true), SessionEffect::Frame(attached)]);
}

#[test]
fn modes_are_those_asked_for_that_the_capability_grants() {
    let all = ["subscribe", "publish", "presence"];
    let cases: [(&str, &[&str], &[&str], bool); 5] = [
        ("all", &["presence", "subscribe"], &["subscribe", "presence"], true),
        ("all", &["publish"], &["publish"], false),
        ("chat", &all, &["subscribe", "publish"], true),
        ("chat", &["presence", "publish"], &["publish"], false),
        ("writer", &all, &["publish"], false),
    ];
    for (key, requested, granted, delivers) in cases {
        let seen = SessionTestClient::key(key).send(&with_modes("chat:1", requested));
        assert_eq!(modes_of(&seen), granted, "{key} {requested:?}");
        assert_eq!(seen[0], SessionEffect::Deliver("chat:1".into(), delivers), "{key} {requested:?}");
    }
}

#[test]
fn modes_that_leave_nothing_are_refused() {
    let cases: [(&str, &str, &[&str], &str); 5] = [
        ("chat", "other", &["subscribe"], "2 a 40160"),
        ("chat", "chat:1", &["presence"], "2 a 40160"),
        ("all", "chat:1", &[], "2 a 40160"),
        ("all", "chat:1", &["subscribe", "read"], "2 a 40000"),
        ("all", "chat:1", &["Subscribe"], "2 a 40000"),
    ];
    for (key, channel, requested, expected) in cases {
        let mut client = SessionTestClient::key(key);
        assert_eq!(brief(&client.send(&with_modes(channel, requested))), [expected], "{key} {requested:?}");
        let seen = client.send(&detach("d", channel));
        assert_eq!(brief(&seen), ["11 d"], "{key} {requested:?}: it was not attached");
    }
}

#[test]
fn attaching_again_sets_the_modes_and_is_resumed() {
    let mut client = SessionTestClient::key("all");
    client.send(&attach("a", "chat:1"));
    let seen = client.send(&with_modes("chat:1", &["publish"]));
    assert_eq!(seen[0], SessionEffect::Deliver("chat:1".into(), false), "delivery ends with the mode");
    let SessionEffect::Frame(attached) = &seen[1] else { panic!("{seen:?}") };
    assert_eq!((&attached["resumed"], modes_of(&seen)), (&json!(true), vec!["publish".to_owned()]));
    let seen = client.send(&with_modes("chat:1", &["subscribe"]));
    assert_eq!(seen[0], SessionEffect::Deliver("chat:1".into(), true));
    assert_eq!(brief(&client.send(&with_modes("chat:1", &["nothing"]))), ["2 a 40000"]);
    assert_eq!(brief(&client.send(&detach("d", "chat:1"))), ["11 d", "detach chat:1"], "still attached");
}

#[test]
fn attach_and_detach_without_an_id_are_answered_too() {
    let mut client = SessionTestClient::key("all");
    let seen = client.send(&json!({"op": 8, "channel": "a"}));
    assert_eq!(brief(&seen), ["deliver a true", "9 "]);
    let seen = client.send(&json!({"op": 10, "channel": "a"}));
    assert_eq!(
        seen,
        [SessionEffect::Frame(json!({"op": 11, "channel": "a"})), SessionEffect::Detach("a".into())]
    );
}

#[test]
fn detach_ends_delivery_once_and_attach_starts_over() {
    let mut client = SessionTestClient::key("all");
    client.send(&attach("a", "a"));
    let detached = SessionEffect::Frame(json!({"op": 11, "id": "d", "channel": "a"}));
    assert_eq!(client.send(&detach("d", "a")), [detached.clone(), SessionEffect::Detach("a".into())]);
    assert_eq!(client.send(&detach("d", "a")), [detached]);
    let seen = client.send(&attach("a", "a"));
    let SessionEffect::Frame(attached) = &seen[1] else { panic!("{seen:?}") };
    assert_eq!(attached["resumed"], json!(false));
}

#[test]
fn channels_at_the_limit_and_one_past() {
    let mut client = SessionTestClient::key("all");
    for number in 0..200 {
        let seen = client.send(&attach("a", &format!("c{number}")));
        assert_eq!(brief(&seen)[1], "9 a", "channel {number}");
    }
    assert_eq!(brief(&client.send(&attach("a", "one more"))), ["2 a 42900"]);
    let again = client.send(&attach("a", "c7"));
    assert_eq!(brief(&again), ["deliver c7 true", "9 a"], "an attached channel is none more");
    client.send(&detach("d", "c7"));
    assert_eq!(brief(&client.send(&attach("a", "one more"))), ["deliver one more true", "9 a"]);
}

#[test]
fn requests_that_came_together_are_all_answered_in_their_order() {
    let mut client = SessionTestClient::key("all");
    let seen = client.send_together(&[attach("1", "a"), detach("2", "a"), attach("3", "a")]);
    assert_eq!(brief(&seen), ["deliver a true", "9 1", "11 2", "detach a", "deliver a true", "9 3"]);
    let seen = client.send_together(&[attach("1", "b"), detach("2", "b")]);
    assert_eq!(brief(&seen), ["deliver b true", "9 1", "11 2", "detach b"]);
    let seen = client.send_together(&[attach("1", "c"), json!({"op": 5})]);
    assert_eq!(brief(&seen), ["deliver c true", "9 1", "6 ", "end 1000"]);
}

#[test]
fn each_answer_has_the_modes_of_its_own_request() {
    let mut client = SessionTestClient::key("all");
    let seen =
        client.send_together(&[with_modes("a", &["publish"]), with_modes("a", &["subscribe", "presence"])]);
    assert_eq!(modes_of(&seen[..2]), ["publish"]);
    assert_eq!(modes_of(&seen[2..]), ["subscribe", "presence"]);
}

#[test]
fn occupancy_needs_a_capability_to_listen_or_see_members() {
    let requested =
        |occupancy: Value| json!({"op": 8, "id": "a", "channel": "chat:1", "occupancy": occupancy});
    let name = ChannelName::of("chat:1");
    for (key, occupancy, expected, watches) in [
        ("chat", json!(true), &["deliver chat:1 true", "9 a"][..], true),
        ("chat", json!(false), &["deliver chat:1 true", "9 a"], false),
        ("chat", json!("true"), &["2 a 40000"], false),
        ("chat", json!(1), &["2 a 40000"], false),
        ("chat", Value::Null, &["2 a 40000"], false),
        ("writer", json!(true), &["2 a 40160"], false),
        ("writer", json!(false), &["deliver chat:1 false", "9 a"], false),
    ] {
        let mut client = SessionTestClient::key(key);
        assert_eq!(brief(&client.send(&requested(occupancy.clone()))), expected, "{key} {occupancy}");
        assert_eq!(client.session.watches(&name), watches, "{key} {occupancy}");
    }
    let mut client = SessionTestClient::key("chat");
    client.send(&requested(json!(true)));
    client.send(&attach("b", "chat:1"));
    assert!(!client.session.watches(&name), "a further attach says anew what is asked");
    client.send(&requested(json!(true)));
    client.send(&detach("d", "chat:1"));
    assert!(!client.session.watches(&name));
}

#[test]
fn occupancy_ends_with_the_capability_for_it() {
    let mut client = SessionTestClient::key("chat");
    let requested = json!({"op": 8, "id": "a", "channel": "chat:1", "modes": ["publish"], "occupancy": true});
    client.send(&requested);
    let name = ChannelName::of("chat:1");
    assert!(client.session.watches(&name) && client.session.is_silent(&name));
    let writer = SessionTestClient::key("writer").session.principal().clone();
    let seen = client.act(|session, _, out| session.renew(writer.clone(), out));
    assert_eq!(brief(&seen), ["recount chat:1"]);
    assert!(!client.session.watches(&name));
}
