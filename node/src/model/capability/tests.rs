use super::*;

fn capability(text: &str) -> Capability {
    Capability::parse_json(text).expect(text)
}

#[test]
fn patterns_match_names_and_prefixes() {
    let cases = [
        (r#"{"*":["publish"]}"#, "anything:at/all", true),
        (r#"{"a":["publish"]}"#, "a", true),
        (r#"{"a":["publish"]}"#, "A", false),
        (r#"{"a":["publish"]}"#, "ab", false),
        (r#"{"a*":["publish"]}"#, "a", true),
        (r#"{"a*":["publish"]}"#, "ab", true),
        (r#"{"a*":["publish"]}"#, "b", false),
        (r#"{"a:*":["publish"]}"#, "a", false),
        (r#"{"a*b":["publish"]}"#, "axb", false),
        (r#"{"a*b":["publish"]}"#, "a*b", true),
        (r#"{"a**":["publish"]}"#, "a*x", true),
        (r#"{"a**":["publish"]}"#, "ax", false),
        (r#"{"grün*":["publish"]}"#, "grüner", true),
        (r#"{"a":["subscribe"],"a*":["publish"]}"#, "a", true),
        (r#"{"a":["subscribe"]}"#, "a", false),
    ];
    for (text, channel, allowed) in cases {
        assert_eq!(capability(text).allows(channel, Operation::Publish), allowed, "{text} on {channel}");
    }
}

#[test]
fn invalid_capability_is_refused_with_reason() {
    let cases = [
        ("", "capability is not JSON"),
        ("{", "capability is not JSON"),
        (r#"{"*":["publish"]} x"#, "capability is not JSON"),
        ("[]", "an object"),
        ("null", "an object"),
        (r#""*""#, "an object"),
        ("{}", "grants nothing"),
        (r#"{"*":[]}"#, "lists no operation"),
        (r#"{"":["publish"]}"#, "empty pattern"),
        (r#"{"*":["admin"]}"#, "unknown operation"),
        (r#"{"*":["Publish"]}"#, "unknown operation"),
        (r#"{"*":["*"]}"#, "unknown operation"),
        (r#"{"*":"publish"}"#, "capability must be an object"),
        (r#"{"*":{"publish":true}}"#, "capability must be an object"),
        (r#"{"*":[1]}"#, "capability must be an object"),
        (r#"{"*":null}"#, "capability must be an object"),
        (r#"{"a":["publish"],"a":["publish"]}"#, "repeats"),
        (r#"{"a":["publish"],"\u0061":["history"]}"#, "repeats"),
    ];
    for (text, expected) in cases {
        let error = Capability::parse_json(text).expect_err(text).to_string();
        assert!(error.contains(expected), "{text}: {error}");
        assert!(!error.contains("line"), "{text}: {error}");
        assert!(!error.contains("publish"), "what has the wrong type is not repeated: {error}");
    }
}

#[test]
fn subsets_are_decided_on_patterns() {
    let cases = [
        (r#"{"*":["publish"]}"#, r#"{"*":["publish"]}"#, true),
        (r#"{"*":["publish"]}"#, r#"{"*":["history","publish"]}"#, true),
        (r#"{"*":["publish","history"]}"#, r#"{"*":["publish"]}"#, false),
        (r#"{"a":["publish"]}"#, r#"{"*":["publish"]}"#, true),
        (r#"{"a":["publish"]}"#, r#"{"a*":["publish"]}"#, true),
        (r#"{"a":["publish"]}"#, r#"{"a":["publish"]}"#, true),
        (r#"{"a*":["publish"]}"#, r#"{"a":["publish"]}"#, false),
        (r#"{"a*":["publish"]}"#, r#"{"a*":["publish"]}"#, true),
        (r#"{"ab*":["publish"]}"#, r#"{"a*":["publish"]}"#, true),
        (r#"{"a*":["publish"]}"#, r#"{"ab*":["publish"]}"#, false),
        (r#"{"*":["publish"]}"#, r#"{"a*":["publish"],"b*":["publish"]}"#, false),
        (r#"{"a:b":["publish","history"]}"#, r#"{"a:*":["publish"],"a:b":["history"]}"#, true),
        (r#"{"a:*":["publish","history"]}"#, r#"{"a:*":["publish"],"*":["history"]}"#, true),
        (r#"{"a:*":["publish","history"]}"#, r#"{"a:*":["publish"],"a:b":["history"]}"#, false),
        (r#"{"a**":["publish"]}"#, r#"{"a*":["publish"]}"#, true),
        (r#"{"a*":["publish"]}"#, r#"{"a**":["publish"]}"#, false),
        (r#"{"a*b":["publish"]}"#, r#"{"a*":["publish"]}"#, true),
        (r#"{"a*":["publish"]}"#, r#"{"a*b":["publish"]}"#, false),
    ];
    for (inner, outer, expected) in cases {
        assert_eq!(capability(inner).is_subset_of(&capability(outer)), expected, "{inner} in {outer}");
    }
}

#[test]
fn the_canonical_text_is_sorted_compact_and_stable() {
    let text = r#" { "ü":["publish"], "b\"":["subscribe","history","history"], "a*" : ["publish"] , "*":["subscribe"]} "#;
    let canonical = capability(text).canonical();
    assert_eq!(
        canonical,
        r#"{"*":["subscribe"],"a*":["publish"],"b\"":["history","subscribe"],"ü":["publish"]}"#
    );
    assert_eq!(capability(&canonical).canonical(), canonical);
    assert_eq!(
        Capability::everything().canonical(),
        r#"{"*":["amqp-subscribe","history","presence","publish","subscribe"]}"#
    );
}

#[test]
fn keys_sort_by_code_point() {
    // In UTF-16 order the second would come first.
    let canonical = capability("{\"\u{1F600}\":[\"publish\"],\"\u{FF5E}\":[\"publish\"]}").canonical();
    assert_eq!(canonical, "{\"\u{FF5E}\":[\"publish\"],\"\u{1F600}\":[\"publish\"]}");
}

#[test]
fn an_operation_is_granted_somewhere_or_not() {
    let some = capability(r#"{"a":["publish"],"b*":["amqp-subscribe"]}"#);
    assert!(some.grants_anywhere(Operation::AmqpSubscribe));
    assert!(!some.grants_anywhere(Operation::History));
    assert!(Capability::all_channels_of(&some).is_subset_of(&some));
}
