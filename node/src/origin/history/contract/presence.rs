//! Presence events: rows of their own, separate from messages.

use std::sync::{Arc, mpsc};

use super::super::{Direction, HistoryPage, HistoryPosition, HistoryQuery, RowKind, StoreError};
use super::bench::{ContractStore, PATIENCE, channel, messages, query, raw, sequences};
use super::{DAY_MS, INCARNATION, StoreFixture};
use crate::model::{
    ChannelKey, ClientId, ConnectionId, MemberId, PresenceAction, PresenceEvent, PresenceStamp,
    RestoredMember, Stamp,
};

fn member(client_id: &str) -> MemberId {
    let connection_id = ConnectionId::from_bytes([7; 16]);
    MemberId { connection_id, client_id: ClientId::of(client_id) }
}

fn event(key: &ChannelKey, timestamp_ms: u64, sequence: u64, action: PresenceAction) -> Arc<PresenceEvent> {
    event_of(member("an\"a"), "1.0", key, timestamp_ms, sequence, action)
}

fn event_of(
    member: MemberId,
    data: &str,
    key: &ChannelKey,
    timestamp_ms: u64,
    sequence: u64,
    action: PresenceAction,
) -> Arc<PresenceEvent> {
    let data = (action != PresenceAction::Leave && !data.is_empty()).then(|| raw(data)).flatten();
    let data = data.map(Arc::from);
    let position = Stamp { incarnation: INCARNATION, sequence: 0 };
    let stamp = PresenceStamp { timestamp_ms, incarnation: INCARNATION, sequence, position };
    PresenceEvent::new(key.clone(), member, 9, action, data, stamp)
}

impl ContractStore<'_> {
    fn append_presence(
        &self,
        event: Arc<PresenceEvent>,
        retention_hours: impl Into<Option<u32>>,
    ) -> Result<(), StoreError> {
        let (send, receive) = mpsc::channel();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        self.store.append_presence(event, retention_hours.into(), done);
        receive.recv_timeout(PATIENCE).expect("answered")
    }
}

fn presence_query(key: &ChannelKey) -> HistoryQuery {
    HistoryQuery { kind: RowKind::Presence, ..query(key) }
}

pub(in super::super) fn presence_beside_messages(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let (key, other) = (channel("acme", "a"), channel("other", "a"));
    bench.append(messages(&key, bench.base_ms, 1..=3), Some(72)).expect("stored");
    for (sequence, action) in
        (1..).zip([PresenceAction::Enter, PresenceAction::Update, PresenceAction::Leave])
    {
        bench.append_presence(event(&key, bench.base_ms + 1, sequence, action), 72).expect("stored");
    }
    let page = bench.read(presence_query(&key));
    let connection = ConnectionId::from_bytes([7; 16]);
    let timestamp = bench.base_ms + 1;
    let record = |action: &str, data: &str| {
        format!(
            r#"{{"channel":"a","action":"{action}","clientId":"an\"a","connectionId":"{connection}"{data},"timestamp":{timestamp}}}"#
        )
    };
    let texts: Vec<&str> = page.rows.iter().map(|row| &*row.json).collect();
    let data = r#","data":1.0"#;
    assert_eq!(texts, [record("leave", ""), record("update", data), record("enter", data)]);
    assert_eq!(sequences(&bench.read(query(&key))), [3, 2, 1], "the messages are as they were");
    assert_eq!(bench.read(presence_query(&other)), HistoryPage::default());

    let first = bench.read(HistoryQuery { limit: 2, ..presence_query(&key) });
    let position = HistoryPosition { timestamp_ms: timestamp, sequence: 2, incarnation: INCARNATION };
    assert_eq!((sequences(&first), first.next), (vec![3, 2], Some(position)));
    let rest = bench.read(HistoryQuery { limit: 2, cursor: first.next, ..presence_query(&key) });
    assert_eq!((sequences(&rest), rest.next), (vec![1], None));
    let forwards = HistoryQuery { direction: Direction::Forwards, ..presence_query(&key) };
    assert_eq!(sequences(&bench.read(forwards)), [1, 2, 3]);
    let early = HistoryQuery { end_ms: Some(timestamp), ..presence_query(&key) };
    assert_eq!(bench.read(early), HistoryPage::default());
    assert_eq!(sequences(&bench.reopen().read(presence_query(&key))), [3, 2, 1]);
}

pub(in super::super) fn presence_outlives_only_its_retention(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let old_ms = bench.base_ms - 2 * DAY_MS;
    bench.append_presence(event(&key, old_ms, 1, PresenceAction::Enter), 1).expect("stored");
    bench.append_presence(event(&key, bench.base_ms, 2, PresenceAction::Update), 1).expect("stored");
    let kept = HistoryQuery { oldest_ms: bench.base_ms, ..presence_query(&key) };
    assert_eq!(sequences(&bench.read(kept)), [2]);
    if bench.store.is_shared() {
        // Rows of a shared store expire by themselves once the time has passed.
        return;
    }
    bench.store.sweep(bench.base_ms).expect("swept");
    assert_eq!(sequences(&bench.read(presence_query(&key))), [2]);
}

impl ContractStore<'_> {
    /// Lists the stored members as channel, name, connection, data and time.
    fn stored_member_texts(&self) -> Vec<String> {
        let mut members = self.store.stored_members().expect("read");
        members.sort_by(|one, other| (&one.key, &one.member).cmp(&(&other.key, &other.member)));
        let text = |stored: RestoredMember| {
            let RestoredMember { key, member, epoch, data, timestamp_ms } = stored;
            assert_eq!(epoch, 9);
            assert_eq!(member.connection_id, ConnectionId::from_bytes([7; 16]));
            let data = data.as_ref().map_or("-", |data| data.get());
            let after_ms = timestamp_ms - self.base_ms;
            format!("{} {} {} {data} {after_ms}", key.account(), key.channel(), member.client_id.as_str())
        };
        members.into_iter().map(text).collect()
    }
}

pub(in super::super) fn members_are_known_until_they_leave(fixture: &dyn StoreFixture) {
    use PresenceAction::{Enter, Leave, Update};
    let bench = ContractStore::new(fixture);
    assert_eq!(bench.stored_member_texts(), Vec::<String>::new());
    let [a, b, other] = [("acme", "a"), ("acme", "b"), ("other", "a")].map(|(one, two)| channel(one, two));
    let (ann, bob) = (member("ann"), member("b\u{e9}\"b"));
    let later_ms = bench.base_ms + 4;
    for (key, member, data, action, retention_hours) in [
        (&a, &ann, "1.0", Enter, Some(72)),
        (&a, &bob, "null", Enter, Some(1)),
        (&b, &ann, "", Enter, None),
        (&other, &ann, "[ 1]", Enter, Some(72)),
        (&other, &bob, "1", Enter, Some(72)),
        (&other, &bob, "1", Leave, Some(72)),
        (&b, &bob, "1", Enter, None),
        (&b, &bob, "1", Leave, None),
    ] {
        let event = event_of(member.clone(), data, key, bench.base_ms, 1, action);
        bench.append_presence(event, retention_hours).expect("stored");
    }
    let event = event_of(ann, "2", &a, later_ms, 2, Update);
    bench.append_presence(event, 72).expect("stored");
    let expected = ["acme a ann 2 4", "acme a b\u{e9}\"b null 0", "acme b ann - 0", "other a ann [ 1] 0"];
    let bench = bench.reopen();
    assert_eq!(bench.stored_member_texts(), expected);
    assert_eq!(bench.read(presence_query(&b)), HistoryPage::default(), "no event was to be stored");
    bench.store.sweep(bench.base_ms + 10 * DAY_MS).expect("swept");
    assert_eq!(bench.reopen().stored_member_texts(), expected, "however long they stay");
}

/// Changes of a member in one write group, of which the last one counts.
pub(in super::super) fn members_that_change_at_once(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let (send, receive) = mpsc::channel();
    let actions = [PresenceAction::Enter, PresenceAction::Update, PresenceAction::Leave];
    for sequence in 0..=2_000 {
        for (name, last) in [("gone", 2), ("here", 1)] {
            let action = actions[sequence as usize % (last + 1)];
            let event = event_of(member(name), &sequence.to_string(), &key, bench.base_ms, sequence, action);
            let send = send.clone();
            let done = Box::new(move |result| send.send(result).expect("test waits"));
            bench.store.append_presence(event, Some(72), done);
        }
    }
    for _ in 0..4_002 {
        assert_eq!(receive.recv_timeout(PATIENCE).expect("answered"), Ok(()));
    }
    // The number 2 000 is the third of three, and the first of two.
    assert_eq!(bench.reopen().stored_member_texts(), ["acme a here 2000 0"]);
}
