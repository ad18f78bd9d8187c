//! Channel names in paths, and serials.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fanfare_proto::path::{ChannelRoute, Operation, PathError, encode_channel, route};
use fanfare_proto::serial::{Serial, SerialError};

fn routed(path: &str) -> Option<(String, Operation)> {
    let ChannelRoute { channel, operation } = route(path).unwrap()?;
    Some((channel, operation))
}

#[test]
fn paths() {
    use Operation::{Channel, History, Presence, PresenceHistory, Publish};
    for (path, channel, operation) in [
        ("/api/channels/a/publish", "a", Publish),
        ("/api/channels/a/history", "a", History),
        ("/api/channels/a/presence", "a", Presence),
        ("/api/channels/a/presence/history", "a", PresenceHistory),
        ("/api/channels/presence/history", "presence", History),
        ("/api/channels//presence/history", "/presence", History),
        ("/api/channels/presence/presence/history", "presence", PresenceHistory),
        ("/api/channels/a%2Fpresence/history", "a/presence", History),
        ("/api/channels/publish/publish", "publish", Publish),
        ("/api/channels//publish/publish", "/publish", Publish),
        ("/api/channels/a/b/publish", "a/b", Publish),
        ("/api/channels/a:b/publish", "a:b", Publish),
        ("/api/channels/a%3Ab/publish", "a:b", Publish),
        ("/api/channels/a%253Ab/publish", "a%3Ab", Publish),
        ("/api/channels/a+b%20c/publish", "a+b c", Publish),
        ("/api/channels/z%C3%BCrich/publish", "zürich", Publish),
        ("/api/channels/a%00/publish", "a\0", Publish),
        ("/api/channels/a", "a", Channel),
        ("/api/channels/a%3Ab", "a:b", Channel),
        ("/api/channels/a/b", "a/b", Channel),
        ("/api/channels/a%2Fb", "a/b", Channel),
        ("/api/channels/a%2Fpublish", "a/publish", Channel),
        ("/api/channels/a%2Fpresence%2Fhistory", "a/presence/history", Channel),
        ("/api/channels/a/Publish", "a/Publish", Channel),
        ("/api/channels/a/publish/", "a/publish/", Channel),
        ("/api/channels/publish", "publish", Channel),
        ("/api/channels//publish", "/publish", Channel),
        ("/api/channels//presence", "/presence", Channel),
    ] {
        assert_eq!(routed(path), Some((channel.to_owned(), operation)), "{path}");
    }
    for path in ["/api/channels", "/api/channels/", "/api/channel/a/publish", "/api/channel/a"] {
        assert_eq!(routed(path), None, "{path}");
    }
}

#[test]
fn bad_escapes() {
    for path in ["%", "%2", "%zz", "a%2/b", "%+2", "%é9"] {
        for operation in ["/publish", ""] {
            let path = format!("/api/channels/{path}{operation}");
            assert_eq!(route(&path), Err(PathError::Escape), "{path}");
        }
    }
    for path in ["%ff", "%C3", "%ED%A0%80", "%C0%AF"] {
        for operation in ["/publish", ""] {
            let path = format!("/api/channels/{path}{operation}");
            assert_eq!(route(&path), Err(PathError::Utf8), "{path}");
        }
    }
}

#[test]
fn the_encoded_form_names_the_channel() {
    assert_eq!(encode_channel("a:b/c d+é%~.-_"), "a%3Ab%2Fc%20d%2B%C3%A9%25~.-_");
    for channel in ["a", "/publish", "presence", "a/presence", "%3A", "zürich 😀", "?#", "\u{7f}"] {
        for (end, operation) in [("/history", Operation::History), ("", Operation::Channel)] {
            let path = format!("/api/channels/{}{end}", encode_channel(channel));
            assert_eq!(routed(&path), Some((channel.to_owned(), operation)), "{channel}");
        }
    }
}

#[test]
fn serial_texts() {
    for (entries, text) in [
        (&[][..], "0"),
        (&[(1, 1)], "AAAAAAAB.1"),
        (&[(0, 0)], "AAAAAAAA.0"),
        (&[(1, 36), (u64::MAX, u64::MAX)], "AAAAAAAB.10~__________8.3w5e11264sgsf"),
    ] {
        let mut serial = Serial::default();
        entries.iter().rev().for_each(|(incarnation, sequence)| serial.advance(*incarnation, *sequence));
        assert_eq!(serial.to_string(), text);
        assert_eq!(text.parse(), Ok(serial));
    }
    assert_eq!(Serial::single(7, 8).entries(), [(7, 8)]);
}

#[test]
fn serials_that_no_node_wrote() {
    let long = vec!["AAAAAAAB.1"; 60].join("~");
    for text in [
        "",
        "1",
        "~",
        ".",
        "AAAAAAAB",
        "AAAAAAAB.",
        "AAAAAAAB.01",
        "AAAAAAAB.+1",
        "AAAAAAAB.A",
        "AAAAAAAB.3w5e11264sgsg",
        "AAAAAAAAAAF.1",
        "AAAAAB.1",
        "AAAAAAAB=.1",
        "AAAAAAAAAA.1",
        "AAAAAAAB.1~",
        "AAAAAAAB.1~AAAAAAAB.2",
        "AAAAAAAC.1~AAAAAAAB.2",
        "AAAAAAAB.1~AAAAAAAAAAE.1",
        "é",
        long.as_str(),
    ] {
        assert_eq!(text.parse::<Serial>(), Err(SerialError), "{text}");
    }
}

#[test]
fn serials_are_vectors() {
    let (a, b) = (Serial::single(1, 5), Serial::single(2, 3));
    let both = a.join(&b);
    assert_eq!(both.entries(), [(1, 5), (2, 3)]);
    assert_eq!(b.join(&a), both);
    assert!(both.includes(&a) && both.includes(&b) && both.includes(&both));
    assert!(!a.includes(&b) && !a.includes(&both));
    assert!(both.includes_one(1, 5) && !both.includes_one(1, 6) && !both.includes_one(3, 1));
    assert!(a.includes(&Serial::default()) && a.includes(&Serial::single(9, 0)));
    assert!(!Serial::default().includes(&a));
    assert_eq!(a.join(&Serial::single(1, 4)), a);
}
