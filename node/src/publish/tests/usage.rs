use super::*;
use crate::model::Amount;

fn counted(node: &PublishTestNode) -> Option<(u64, u64)> {
    let amount = node.account.usage.take(UsageKind::Publish);
    amount.map(|Amount { count, bytes }| (count, bytes))
}

#[test]
fn acked_publish_is_counted_with_size_of_each_message() {
    let node = PublishTestNode::new();
    let full = Draft {
        name: Some("a\"b".into()),
        extras: Some(RawValue::from_string(r#"{"h":1}"#.into()).unwrap()),
        ..plain("[1.0,null]")
    };
    let sizes = [draft_bytes(&full, None), draft_bytes(&plain("12"), None), 0];
    assert_eq!(sizes, [6 + 10 + 7, 2, 0]);
    node.acked("a", vec![full.clone(), plain("12"), Draft::default()]);
    assert_eq!(counted(&node), Some((3, 25)));
    let mut request = node.request("a", vec![full]);
    request.client_id = Some(ClientId::of("añ"));
    node.outcome(request).unwrap();
    assert_eq!(counted(&node), Some((1, 23 + 5)));
}

#[test]
fn a_repeated_id_is_acked_and_not_counted_again() {
    let node = PublishTestNode::new();
    let message = |id: &str| Draft { id: Some(id.into()), ..plain("1234") };
    node.acked("a", vec![message("x"), message("y"), message("x")]);
    assert_eq!(counted(&node), Some((2, 8)));
    assert_eq!(node.acked("a", vec![message("y"), message("x")]), [2, 1]);
    assert_eq!(counted(&node), None);
}

#[test]
fn unacked_publish_is_not_counted() {
    let node = PublishTestNode::new();
    *node.store.append_error.lock() = Some(StoreError::Failed("disk gone".into()));
    assert_eq!(node.outcome(node.request("a", vec![plain("1")])), Err(PublishError::Unavailable));
    assert!(node.outcome(node.request("a", vec![])).is_err());
    assert_eq!(counted(&node), None);
}
