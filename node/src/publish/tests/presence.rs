use tokio_util::sync::CancellationToken;

use super::*;
use crate::model::{
    ClientId, MemberId, PresenceAction, RestoredMember, SessionLocation, SessionOwner, SessionOwnership,
    SessionTakeover,
};

fn member(connection: u8, client_id: &str) -> MemberId {
    MemberId { connection_id: ConnectionId::from_bytes([connection; 16]), client_id: ClientId::of(client_id) }
}

impl PublishTestNode {
    fn presence(
        &self,
        channel: &str,
        member: MemberId,
        action: PresenceAction,
        data: &str,
    ) -> PresenceRequest {
        PresenceRequest {
            key: self.key(channel),
            account: Arc::clone(&self.account),
            member,
            epoch: 0,
            action,
            data: (!data.is_empty()).then(|| RawValue::from_string(data.to_owned()).unwrap()),
        }
    }

    fn presented(&self, request: PresenceRequest) -> Result<(), PresenceError> {
        let answered = Arc::new(Mutex::new(Vec::new()));
        let answers = Arc::clone(&answered);
        self.publisher.present(request, Box::new(move |result| answers.lock().push(result)));
        let mut answered = answered.lock();
        assert_eq!(answered.len(), 1, "answered exactly once");
        answered.remove(0)
    }

    fn enter(&self, channel: &str, member: MemberId, data: &str) -> Result<(), PresenceError> {
        self.presented(self.presence(channel, member, PresenceAction::Enter, data))
    }

    /// Action, client and data of every event that subscribers got.
    fn events(&self) -> Vec<String> {
        let presence = self.target.presence.lock();
        let text = |delivery: &Arc<PresenceDelivery>| {
            let event = &delivery.event;
            let data = event.data.as_ref().map_or("-", |data| data.get());
            format!("{} {} {data}", event.action, event.member.client_id.as_str())
        };
        presence.iter().map(text).collect()
    }

    fn delayed_leave(&self, connection: u8, epoch: u64) -> DelayedLeave {
        DelayedLeave {
            connection_id: ConnectionId::from_bytes([connection; 16]),
            owner: SessionOwner { epoch, incarnation: self.hub.incarnation() },
            account: Arc::clone(&self.account),
            keeps: None,
        }
    }

    fn take_over(&self, connection: u8, epoch: u64) {
        let location =
            SessionLocation { incarnation: self.hub.incarnation(), shard: 0, slot: 0, generation: 1 };
        let ownership =
            SessionOwnership { connection_id: ConnectionId::from_bytes([connection; 16]), epoch, location };
        self.publisher.take_over_session(&SessionTakeover { ownership, previous: location });
    }

    fn members(&self, channel: &str) -> Vec<String> {
        let members = self.hub.members(&self.key(channel));
        members.into_iter().map(|(id, _)| id.client_id.as_str().to_owned()).collect()
    }

    /// Runs what is due until `done`, for at most ten seconds.
    fn until(&self, done: impl Fn() -> bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let watched = async {
                while !done() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::select! {
                () = self.publisher.clone().run_delayed_leaves(CancellationToken::new()) => {}
                () = watched => {}
                () = tokio::time::sleep(Duration::from_secs(10)) => panic!("nothing happened"),
            }
        });
    }
}

#[test]
fn presence_events_stored_and_delivered_in_sequence_order() {
    let node = PublishTestNode::new();
    node.hub.attach(&node.key("a"), 0);
    let stored = |sequence| PublishStoreCall::Presence { sequence, retention_hours: Some(72) };
    assert_eq!(node.enter("a", member(1, "ann"), "1"), Ok(()));
    assert_eq!(node.enter("a", member(1, "bob"), ""), Ok(()));
    assert_eq!(node.enter("a", member(1, "ann"), "1"), Ok(()), "already so");
    assert_eq!(node.enter("a", member(1, "ann"), "2"), Ok(()));
    let leave = |member| node.presence("a", member, PresenceAction::Leave, "");
    assert_eq!(node.presented(leave(member(1, "ann"))), Ok(()));
    assert_eq!(node.presented(leave(member(1, "ann"))), Ok(()), "absent already");
    let update = node.presence("a", member(2, "ann"), PresenceAction::Update, "3");
    assert_eq!(node.presented(update), Ok(()));
    let expected = ["enter ann 1", "enter bob -", "update ann 2", "leave ann 2", "enter ann 3"];
    assert_eq!(node.events(), expected);
    assert_eq!(node.store.take_calls(), [1, 2, 3, 4, 5].map(stored));
    assert_eq!(node.members("a"), ["bob", "ann"]);
    let counted = node.account.usage.take(crate::model::UsageKind::Presence);
    assert_eq!(counted.map(|amount| (amount.count, amount.bytes)), Some((5, 5 * 5 + 4)), "names count too");
}

#[test]
fn an_event_does_not_move_the_position_of_the_messages() {
    let node = PublishTestNode::new();
    let sequences = node.acked("a", vec![plain("1")]);
    node.enter("a", member(1, "ann"), "").unwrap();
    assert_eq!(node.target.presence.lock()[0].offset(), sequences[0]);
    assert_eq!(node.acked("a", vec![plain("2")]), [sequences[0] + 1]);
}

#[test]
fn presence_without_history_stores_member_and_ignores_failure() {
    let node = PublishTestNode::new();
    *node.store.append_error.lock() = Some(StoreError::Failed("no disk".into()));
    assert_eq!(node.enter("off:a", member(1, "ann"), ""), Ok(()));
    *node.store.append_error.lock() = None;
    assert_eq!(node.enter("short:a", member(1, "ann"), ""), Ok(()));
    let calls = [(1, None), (2, Some(24))];
    let calls =
        calls.map(|(sequence, retention_hours)| PublishStoreCall::Presence { sequence, retention_hours });
    assert_eq!(node.store.take_calls(), calls);
}

#[test]
fn presence_beyond_limits_is_refused_without_changes() {
    let node = PublishTestNode::new();
    let data = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
    assert_eq!(node.enter("a", member(1, "ann"), &data(16_384)), Ok(()));
    let large = PresenceError::DataTooLarge { bytes: 16_385, bytes_max: 16_384 };
    assert_eq!(node.enter("a", member(1, "bob"), &data(16_385)), Err(large));
    for n in 1..5_000 {
        node.enter("a", member(1, &n.to_string()), "").unwrap();
    }
    let full = PresenceError::Refused(crate::hub::PresenceRefusal::Channel { members_max: 5_000 });
    assert_eq!(node.enter("a", member(1, "bob"), ""), Err(full));
    assert_eq!(node.members("a").len(), 5_000);
    assert_eq!(node.enter("a", member(1, "ann"), "0"), Ok(()), "who is there may change");
    let leave = node.presence("a", member(1, "ann"), PresenceAction::Leave, "");
    assert_eq!(node.presented(leave), Ok(()));
    assert_eq!(node.enter("a", member(1, "bob"), ""), Ok(()));
    for n in 1..=5_000 {
        node.enter(&format!("b{n}"), member(1, "ann"), "").unwrap();
    }
    let full = PresenceError::Refused(crate::hub::PresenceRefusal::Connection { members_max: 10_000 });
    assert_eq!(node.enter("c", member(1, "ann"), ""), Err(full));
    *node.store.full.lock() = true;
    assert_eq!(node.enter("c", member(2, "ann"), ""), Err(PresenceError::Busy));
}

#[test]
fn failed_store_is_reported_and_the_event_has_happened() {
    let node = PublishTestNode::new();
    *node.store.append_error.lock() = Some(StoreError::Failed("no disk".into()));
    assert_eq!(node.enter("a", member(1, "ann"), ""), Err(PresenceError::Unavailable));
    assert_eq!(node.members("a"), ["ann"]);
}

#[test]
fn closed_connection_leaves_all_channels_and_others_stay() {
    let node = PublishTestNode::new();
    for channel in ["a", "b"] {
        node.hub.attach(&node.key(channel), 0);
        node.enter(channel, member(1, "ann"), "7").unwrap();
        node.enter(channel, member(2, "ann"), "").unwrap();
    }
    node.publisher.leave(node.delayed_leave(1, 0));
    node.publisher.leave_after_timeout(node.delayed_leave(1, 0));
    node.until(|| node.members("b").len() == 1);
    assert_eq!(node.events()[4..], ["leave ann 7", "leave ann 7"], "with the last data");
    assert_eq!(node.hub.members(&node.key("a"))[0].0, member(2, "ann"));
}

#[test]
fn lost_member_stays_present_and_session_takeover_keeps_it() {
    let node = PublishTestNode::new();
    node.enter("a", member(1, "ann"), "").unwrap();
    node.publisher.leave_after_timeout(node.delayed_leave(1, 0));
    node.take_over(1, 1);
    node.publisher.leave(node.delayed_leave(1, 0));
    node.enter("b", member(2, "bob"), "").unwrap();
    node.publisher.leave(node.delayed_leave(2, 0));
    node.until(|| node.members("b").is_empty());
    assert_eq!(node.members("a"), ["ann"], "an end of a former epoch means nothing");
    let late = node.presence("a", member(1, "ann"), PresenceAction::Leave, "");
    node.presented(late).unwrap();
    assert_eq!(node.members("a"), ["ann"], "neither does a request");
    node.publisher.leave(node.delayed_leave(1, 1));
    node.until(|| node.members("a").is_empty());
}

#[test]
fn members_without_presence_grant_leave_but_later_entry_stays() {
    let node = PublishTestNode::new();
    for channel in ["chat:1", "news:1"] {
        node.enter(channel, member(1, "ann"), "").unwrap();
    }
    let keeps =
        crate::model::Capability::parse_json(r#"{"chat:*":["presence"],"news:*":["subscribe"]}"#).unwrap();
    node.publisher.leave(DelayedLeave { keeps: Some(vec![Arc::new(keeps)]), ..node.delayed_leave(1, 0) });
    node.enter("news:2", member(1, "ann"), "").unwrap();
    node.until(|| node.members("news:1").is_empty());
    assert_eq!((node.members("chat:1").len(), node.members("news:2").len()), (1, 1));
}

fn restored_member(connection: u8, name: &str, epoch: u64) -> RestoredMember {
    RestoredMember {
        key: ChannelKey::new(AccountId::new("acme-prod"), ChannelName::of("a")),
        member: member(connection, name),
        epoch,
        data: Some(Arc::from(RawValue::from_string("7".into()).expect("JSON"))),
        timestamp_ms: 5,
    }
}

#[test]
fn restored_member_enters_silently_leaves_once_without_takeover() {
    let node = PublishTestNode::new();
    node.hub.attach(&node.key("a"), 0);
    for (connection, name) in [(1, "ann"), (1, "bob"), (2, "cid")] {
        node.hub.restore(restored_member(connection, name, 3));
    }
    let crowd = [(ChannelName::of("a"), 3)];
    assert_eq!(node.hub.channel_member_counts(node.key("a").account()), crowd);
    let known = node.hub.members(&node.key("a"));
    assert_eq!(known.iter().map(|(_, member)| member.timestamp_ms).collect::<Vec<_>>(), [5, 5, 5]);
    node.take_over(1, 4);
    node.publisher.leave(node.delayed_leave(1, 3));
    node.publisher.leave(node.delayed_leave(2, 3));
    node.until(|| node.members("a").len() == 2);
    assert_eq!(node.presented(node.presence("a", member(1, "ann"), PresenceAction::Enter, "7")), Ok(()));
    assert_eq!(node.events(), ["leave cid 7"], "with the last data, and nothing of those who came back");
}

#[test]
fn last_delayed_leave_check_removes_closed_and_keeps_lost() {
    let node = PublishTestNode::new();
    for connection in [1, 2] {
        node.enter("a", member(connection, "ann"), "").expect("entered");
    }
    node.publisher.leave_after_timeout(node.delayed_leave(1, 0));
    node.publisher.leave(node.delayed_leave(2, 0));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let stopping = CancellationToken::new();
    stopping.cancel();
    runtime.block_on(node.publisher.clone().run_delayed_leaves(stopping));
    assert_eq!(node.members("a").len(), 2, "a stopping node looks once, when all connections have ended");
    runtime.block_on(node.publisher.finish_due_leaves());
    assert_eq!(node.hub.members(&node.key("a"))[0].0, member(1, "ann"));
    assert_eq!(node.members("a").len(), 1);
}
