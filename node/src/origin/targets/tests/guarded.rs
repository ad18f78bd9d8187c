//! Addresses that the guard allows.

use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

const REFUSED: &str = "address not allowed";

/// Hosts that reach the test's receiver without a guard, or other addresses that are not public.
const FORMS: &[&str] = &[
    // Literal IPv4 in every form that a URL may have.
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.0.0.1",
    "0x7f.1",
    "0177.0.0.1",
    "0177.0.0.01",
    "127.0.0.1.",
    "127.0.0.0x1",
    "%31%32%37.0.0.1",
    "１２７.0.0.1",
    "127。0。0。1",
    "0.0.0.0",
    "0",
    "127.0.0.2",
    "127.255.255.254",
    // Literal IPv6, also with IPv4 in it.
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:7f00:0001]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b:1::7f00:1]",
    "[2002:7f00:1::]",
    "[2001:0:7f00:1::]",
    "[fe80::1]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[ff02::1]",
    "[2001:db8::1]",
    // Private, shared, link-local and metadata.
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "100.64.0.1",
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "224.0.0.1",
    "255.255.255.255",
    // User info that looks like a host.
    "example.com@127.0.0.1",
    "example.com:443@127.0.0.1",
    "8.8.8.8%2f@127.0.0.1",
    // Names.
    "loopback.test",
    "LOOPBACK.test.",
    "loopback6.test",
    "mapped.test",
    "nat64.test",
    "private.test",
    "metadata.test",
];

fn names() -> TargetLookups {
    TargetLookups::by(|host| {
        let address = match host.trim_end_matches('.') {
            "loopback6.test" => "::1",
            "mapped.test" => "::ffff:127.0.0.1",
            "nat64.test" => "64:ff9b::7f00:1",
            "private.test" => "10.0.0.1",
            "metadata.test" => "169.254.169.254",
            _ => "127.0.0.1",
        };
        Ok(vec![address.parse().expect("an address"), "::1".parse().expect("an address")])
    })
}

#[tokio::test]
async fn no_form_of_a_special_address_is_connected_to() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(204));
    // Only on a machine with IPv6.
    let v6 = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), receiver.port());
    let v6 = HttpTestReceiver::at(v6, |_| ReceiverAnswer::status(204)).ok();
    // A rule for another port or address allows nothing here.
    let webhooks = webhooks_with(&["127.0.0.1:1", "[::1]:1", "127.0.0.3"], names());
    assert!(FORMS.len() >= 30);
    for form in FORMS {
        for path in ["", "/@8.8.8.8", "/?u=http://8.8.8.8/"] {
            let target = target(&format!("http://{form}:{}{path}", receiver.port()), "timeout_ms = 5000");
            assert_eq!(
                webhooks.send(&target, &delivery()).await,
                DeliveryOutcome::retry(REFUSED),
                "{form}{path}"
            );
        }
    }
    assert_eq!(receiver.connections(), 0);
    assert_eq!(v6.map_or(0, |v6| v6.connections()), 0);
}

#[tokio::test]
async fn the_port_of_mail_needs_a_rule_of_its_own() {
    for host in ["8.8.8.8", "127.0.0.1", "public.test"] {
        let webhooks =
            webhooks_with(&["0.0.0.0/0"], TargetLookups::by(|_| Ok(vec!["8.8.8.8".parse().unwrap()])));
        let outcome = webhooks.send(&target(&format!("http://{host}:25/"), ""), &delivery()).await;
        assert_eq!(outcome, DeliveryOutcome::retry(REFUSED), "{host}");
    }
}

#[tokio::test]
async fn a_rule_opens_the_address_and_port_it_names() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(204));
    let other = HttpTestReceiver::at(SocketAddr::new("127.0.0.2".parse().unwrap(), receiver.port()), |_| {
        ReceiverAnswer::status(204)
    });
    let port = receiver.port();
    for (rule, is_open) in [
        (format!("127.0.0.1:{port}"), true),
        ("127.0.0.1".to_owned(), true),
        ("127.0.0.0/31".to_owned(), true),
        (format!("127.0.0.1:{}", port ^ 1), false),
        ("127.0.0.2".to_owned(), false),
        ("::ffff:127.0.0.1".to_owned(), false),
        ("::/0".to_owned(), false),
    ] {
        for host in ["127.0.0.1", "2130706433", "some.test"] {
            let names = TargetLookups::by(|_| Ok(vec!["127.0.0.2".parse().unwrap(), LOOPBACK]));
            let webhooks = webhooks_with(&[&rule], names);
            let outcome = webhooks.send(&target(&format!("http://{host}:{port}"), ""), &delivery()).await;
            match (is_open, host, rule.as_str()) {
                (true, ..) => assert_eq!(outcome, DeliveryOutcome::Delivered, "{rule} {host}"),
                // The rule allows the other address of the name, and that one alone.
                (false, "some.test", "127.0.0.2") => assert_eq!(outcome, DeliveryOutcome::Delivered),
                (false, ..) => assert_eq!(outcome, DeliveryOutcome::retry(REFUSED), "{rule} {host}"),
            }
        }
    }
    assert_eq!(receiver.ip(), LOOPBACK);
    assert_eq!(other.map_or(1, |other| other.connections()), 1, "of the last rule but two");
}

#[tokio::test]
async fn the_address_that_was_checked_is_connected_to() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::head("200 OK\r\nconnection: close"));
    let trap = HttpTestReceiver::at(SocketAddr::new("127.0.0.2".parse().unwrap(), receiver.port()), |_| {
        ReceiverAnswer::status(204)
    });
    let trap = trap.expect("the port is free there too");
    let look_ups = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&look_ups);
    // The name server answers with an allowed address first, and with a refused one to the next look-up.
    let names = TargetLookups::by(move |_| match counted.fetch_add(1, Ordering::SeqCst) {
        0 => Ok(vec![LOOPBACK]),
        _ => Ok(vec!["127.0.0.2".parse().unwrap()]),
    });
    let webhooks = webhooks_with(&["127.0.0.1"], names);
    let target = target(&format!("http://rebinding.test:{}", receiver.port()), "");
    assert_eq!(webhooks.send(&target, &delivery()).await, DeliveryOutcome::Delivered);
    assert_eq!(look_ups.load(Ordering::SeqCst), 1, "one look-up for check and connection");
    assert_eq!(webhooks.send(&target, &delivery()).await, DeliveryOutcome::retry(REFUSED));
    assert_eq!((look_ups.load(Ordering::SeqCst), trap.connections()), (2, 0));
}

#[tokio::test]
async fn a_name_that_is_not_found_is_tried_again() {
    let fail = |_: &str| Err(std::io::Error::other("no such host"));
    for (names, expected) in [
        (TargetLookups::by(fail), "cannot connect: host not found: no such host"),
        (TargetLookups::by(|_| Ok(Vec::new())), "cannot connect: host not found: it has no address"),
        (
            TargetLookups::by(|_| panic!("a look-up that fails")),
            "cannot connect: host not found: the look-up failed",
        ),
    ] {
        let outcome = webhooks_with(&[], names).send(&target("http://absent.test", ""), &delivery()).await;
        assert_eq!(outcome, DeliveryOutcome::retry(expected));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_look_up_that_hangs_is_asked_once_and_holds_no_other() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(204));
    let (go_on, hang) = std::sync::mpsc::channel::<()>();
    let (hang, look_ups) = (Mutex::new(hang), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&look_ups);
    let names = TargetLookups::by(move |host| {
        if host == "hanging.test" && counted.fetch_add(1, Ordering::SeqCst) == 0 {
            hang.lock().expect("no other look-up").recv().ok();
        }
        Ok(vec![LOOPBACK])
    });
    let webhooks = webhooks_with(&["127.0.0.1"], names);
    let url = |host: &str| format!("http://{host}:{}", receiver.port());
    let hanging = target(&url("hanging.test"), "timeout_ms = 100");
    for _ in 0..3 {
        assert_eq!(
            webhooks.send(&hanging, &delivery()).await,
            DeliveryOutcome::retry("no answer within 100 ms")
        );
    }
    assert_eq!(webhooks.send(&target(&url("other.test"), ""), &delivery()).await, DeliveryOutcome::Delivered);
    assert_eq!(look_ups.load(Ordering::SeqCst), 1);
    drop(go_on);
    let patient = target(&url("hanging.test"), "timeout_ms = 10000");
    assert_eq!(webhooks.send(&patient, &delivery()).await, DeliveryOutcome::Delivered);
}
