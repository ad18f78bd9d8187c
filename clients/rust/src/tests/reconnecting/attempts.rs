//! Answers that end the attempts to connect again, and answers that do not.

use super::*;

#[tokio::test]
async fn an_own_attempt_that_the_node_saw_late_is_no_refusal() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        for gateway in [false, true] {
            drop(Server::connected(&listener).await);
            if gateway {
                refuse(&listener, "504 Gateway Timeout").await;
            } else {
                drop(request(&listener).await);
            }
            let mut server = again(&listener, "&resume=k", "k2").await;
            server.say(&json!({"op": 7, "code": 40800, "error": "taken up"})).await;
            drop(server);
            let mut server = again(&listener, "&resume=k2", "k3").await;
            server.say(&json!({"op": 7, "code": 40160, "error": "closed"})).await;
        }
    });
    for _cut_by in ["the link", "a gateway"] {
        let mut client = Client::connect(reconnecting(addr)).await.expect("connected");
        for expected in [
            "disconnected",
            "connected k2",
            "disconnected",
            "connected k3",
            r#"Refused { code: 40160, error: "closed" }"#,
        ] {
            assert_eq!(next(&mut client).await, expected);
        }
    }
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn a_refused_credential_ends_the_attempts() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        drop(Server::connected(&listener).await);
        refuse(&listener, "401 Unauthorized").await;
    });
    let mut client = Client::connect(reconnecting(addr)).await.expect("connected");
    let waiting = client.handle();
    assert_eq!(next(&mut client).await, "disconnected");
    let attach = waiting.attach("c");
    let (attached, ended) = soon(async { tokio::join!(attach, client.next()) }).await;
    assert!(matches!(attached, Err(Error::Closed)), "{attached:?}");
    assert!(matches!(ended, Some(Event::Ended(Ending::Refused { code: 40100, .. }))), "{ended:?}");
    soon(tasks.join_all()).await;
}
