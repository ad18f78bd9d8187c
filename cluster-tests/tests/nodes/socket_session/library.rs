//! The Rust client against a real node.

use fanfare_client::{Client, Credential, Draft, Error, Event, Format, Options};

use super::{EVERYTHING, node, token};

#[tokio::test(flavor = "multi_thread")]
async fn the_client_library_speaks_with_the_node() {
    let node = node().await;
    for format in [Format::Json, Format::MsgPack] {
        let credential = Credential::Token(token(EVERYTHING, Some("lib"), 600));
        let options = Options { format, ..Options::new(format!("http://{}", node.addr()), credential) };
        let mut client = Client::connect(options).await.expect("connected");
        assert_eq!(client.connected().client_id.as_deref(), Some("lib"));
        let attached = client.attach("library").await.expect("attached");
        assert!(!attached.resumed);
        let draft = |name: &str| Draft { name: Some(name.into()), ..Draft::default() };
        let first = client.publish_start("library", vec![draft("a"), draft("b")]).await.expect("sent");
        let second = client.publish_start("library", vec![draft("c")]).await.expect("sent");
        assert_eq!(second.await.expect("serials").len(), 1);
        assert_eq!(first.await.expect("serials").len(), 2);
        for names in [&["a", "b"][..], &["c"]] {
            let Some(Event::Messages(delivery)) = client.next().await else {
                unreachable!("a delivery of {names:?}")
            };
            let got: Vec<_> =
                delivery.messages.iter().filter_map(|message| message.name.as_deref()).collect();
            assert_eq!(got, names);
        }
        client.refresh(&token(EVERYTHING, Some("lib"), 900)).await.expect("refreshed");
        assert!(matches!(client.next().await, Some(Event::Connected(connected)) if connected.resumed));
        let refused = client.attach("[reserved]").await;
        assert!(matches!(refused, Err(Error::Refused { code: 40003, .. })), "{refused:?}");
        client.detach("library").await.expect("detached");
        client.close().await.expect("closed");
    }
    let refused = Client::connect(Options::new(node.url(), Credential::Key("wrong.k1".into()))).await;
    assert!(matches!(refused, Err(Error::Http { status: 401, error, .. }) if error == "unauthorized"));
}
