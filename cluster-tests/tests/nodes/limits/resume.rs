//! Age and size up to which a serial is accepted.

use std::time::{Duration, Instant};

use fanfare_proto::serial::Serial;

use super::*;

/// Attaches on a fresh connection with a serial, and leaves it open.
async fn attach_after(node: &Node, format: &str, serial: &Value) -> (Socket, Value) {
    let mut socket = Socket::open(node, &format!("?{format}")).await;
    let attached = socket.ask(json!({"op": 8, "channel": "c", "serial": serial})).await;
    assert_eq!(attached["op"], 9, "never an error: {attached}");
    (socket, attached)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_position_is_good_for_its_window_and_in_the_end_no_longer() {
    const WINDOW_MS: u64 = 1_500;
    let node =
        Node::start(options().limit("resume_window_ms", WINDOW_MS).environment("FANFARE_STORE", "none"))
            .await;
    let mut socket = Socket::open(&node, "").await;
    let serial = socket.attach("c").await["serial"].clone();
    let lost = Instant::now();
    drop(socket);
    assert_eq!(publish(&node, r#"{"data":"missed"}"#).await.status, 200);
    wait_until(SOON, "the position to be forgotten", async || {
        let (mut socket, attached) = attach_after(&node, "", &serial).await;
        if attached["resumed"] == true {
            assert_eq!(socket.message("c").await["messages"][0]["data"], "missed");
            return false;
        }
        assert!(lost.elapsed() >= Duration::from_millis(WINDOW_MS), "late it may be, early never");
        true
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serial_of_512_bytes_is_read_and_no_longer_one() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let own: Serial = socket.attach("c").await["serial"].as_str().expect("a serial").parse().expect("ours");
    // Adds incarnations without messages, as many as fit.
    let mut fitting = own.clone();
    let mut longer = own;
    for incarnation in 1.. {
        longer.advance(incarnation, 0);
        if longer.to_whole().len() > Serial::BYTES_MAX {
            break;
        }
        fitting = longer.clone();
    }
    assert!(fitting.to_string().len() > Serial::BYTES_MAX - 14);
    for format in FORMATS {
        let fits = json!(fitting.to_string());
        assert_eq!(attach_after(&node, format, &fits).await.1["resumed"], true, "{format}");
        for unreadable in [&longer.to_whole(), &longer.to_string(), &"A".repeat(100_000), "no serial", ""] {
            let (mut socket, attached) = attach_after(&node, format, &json!(unreadable)).await;
            assert_eq!(attached["resumed"], false, "{format}");
            assert_eq!(publish(&node, r#"{"data":"live"}"#).await.status, 200);
            assert_eq!(socket.message("c").await["messages"][0]["data"], "live", "it is attached");
        }
    }
}
