use super::*;

fn attach_back(channel: &str, rewind: &str) -> Value {
    json!({"op": 8, "id": "a", "channel": channel, "rewind": rewind})
}

/// Start that the attach in this request asks for.
fn looked_for(client: &mut SessionTestClient, request: &Value) -> Option<DeliveryStart> {
    client.send(request);
    client.looked_for.pop().map(|(begin, _)| begin)
}

#[test]
fn a_rewind_is_looked_for_at_the_first_attach_alone() {
    let mut client = SessionTestClient::key("all");
    let last_ten = Rewind { count: 10, since_ms: 0, is_cut: false };
    assert_eq!(looked_for(&mut client, &attach_back("a", "10")), Some(DeliveryStart::Rewind(last_ten)));
    let five_minutes = Rewind { count: 100, since_ms: NOW_MS - 300_000, is_cut: false };
    assert_eq!(looked_for(&mut client, &attach_back("b", "5m")), Some(DeliveryStart::Rewind(five_minutes)));
    client.send(&attach("a", "c"));
    assert_eq!(looked_for(&mut client, &attach_back("c", "10")), None, "attached already");
    let with_serial = json!({"op": 8, "channel": "d", "rewind": "10", "serial": "not one"});
    assert_eq!(looked_for(&mut client, &with_serial), None, "who comes back does not begin anew");
    let silent = json!({"op": 8, "channel": "e", "rewind": "10", "modes": ["presence"]});
    assert_eq!(looked_for(&mut client, &silent), None, "it has messages only");
}

#[test]
fn a_rewind_at_its_limit_and_one_past() {
    let mut client = SessionTestClient::key("all");
    assert!(looked_for(&mut client, &attach_back("a", "100")).is_some());
    for bad in ["101", "0", "", "ten", "5h", "-5s"] {
        let seen = client.send(&attach_back("b", bad));
        assert_eq!(brief(&seen), ["2 a 40000"], "{bad}");
        assert!(frame(&seen)["error"].as_str().is_some_and(|error| error.starts_with("rewind ")));
    }
    assert_eq!(brief(&client.send(&attach("a", "b"))), ["deliver b true", "9 a"], "it was not attached");
}

#[test]
fn rewind_beyond_the_resume_window_needs_history() {
    let subscriber = token_of("all", &json!({"*": ["subscribe"]}), None, 3600);
    let mut client = SessionTestClient::token(&subscriber);
    let window_ms = client.limits.resume_window_ms;
    let within = format!("{}s", window_ms / 1_000);
    let since_ms = NOW_MS - window_ms;
    let whole = Rewind { count: 100, since_ms, is_cut: false };
    assert_eq!(looked_for(&mut client, &attach_back("a", &within)), Some(DeliveryStart::Rewind(whole)));
    let cut = Rewind { is_cut: true, ..whole };
    let beyond = format!("{}s", window_ms / 1_000 + 1);
    assert_eq!(looked_for(&mut client, &attach_back("b", &beyond)), Some(DeliveryStart::Rewind(cut)));
    let counted = Rewind { count: 7, ..cut };
    assert_eq!(looked_for(&mut client, &attach_back("c", "7")), Some(DeliveryStart::Rewind(counted)));
}
