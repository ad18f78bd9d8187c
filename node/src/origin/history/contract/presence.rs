//! Presence events: rows of their own, that no message ever stands among.

use std::sync::{Arc, mpsc};

use super::super::{Direction, HistoryPage, HistoryQuery, Position, RowKind, StoreError};
use super::bench::{Bench, PATIENCE, channel, messages, query, raw, sequences};
use super::{DAY_MS, INCARNATION, Place};
use crate::model::{
    ChannelKey, ClientId, ConnectionId, MemberId, PresenceAction, PresenceEvent, PresenceStamp, Stamp,
};

fn event(key: &ChannelKey, timestamp_ms: u64, sequence: u64, action: PresenceAction) -> Arc<PresenceEvent> {
    let connection_id = ConnectionId::from_bytes([7; 16]);
    let member = MemberId { connection_id, client_id: ClientId::of("an\"a") };
    let data = (action != PresenceAction::Leave).then(|| raw("1.0").expect("data").into());
    let position = Stamp { incarnation: INCARNATION, sequence: 0 };
    let stamp = PresenceStamp { timestamp_ms, incarnation: INCARNATION, sequence, position };
    PresenceEvent::new(key.clone(), member, action, data, stamp)
}

impl Bench<'_> {
    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: u32) -> Result<(), StoreError> {
        let (send, receive) = mpsc::channel();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        self.store.append_presence(event, retention_hours, done);
        receive.recv_timeout(PATIENCE).expect("answered")
    }
}

fn presence_query(key: &ChannelKey) -> HistoryQuery {
    HistoryQuery { kind: RowKind::Presence, ..query(key) }
}

pub(in super::super) fn presence_beside_messages(place: &dyn Place) {
    let bench = Bench::new(place);
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
    let position = Position { timestamp_ms: timestamp, sequence: 2, incarnation: INCARNATION };
    assert_eq!((sequences(&first), first.next), (vec![3, 2], Some(position)));
    let rest = bench.read(HistoryQuery { limit: 2, cursor: first.next, ..presence_query(&key) });
    assert_eq!((sequences(&rest), rest.next), (vec![1], None));
    let forwards = HistoryQuery { direction: Direction::Forwards, ..presence_query(&key) };
    assert_eq!(sequences(&bench.read(forwards)), [1, 2, 3]);
    let early = HistoryQuery { end_ms: Some(timestamp), ..presence_query(&key) };
    assert_eq!(bench.read(early), HistoryPage::default());
    assert_eq!(sequences(&bench.reopen().read(presence_query(&key))), [3, 2, 1]);
}

pub(in super::super) fn presence_outlives_only_its_retention(place: &dyn Place) {
    let bench = Bench::new(place);
    let key = channel("acme", "a");
    let old_ms = bench.base_ms - 2 * DAY_MS;
    bench.append_presence(event(&key, old_ms, 1, PresenceAction::Enter), 1).expect("stored");
    bench.append_presence(event(&key, bench.base_ms, 2, PresenceAction::Update), 1).expect("stored");
    bench.store.sweep(bench.base_ms).expect("swept");
    assert_eq!(sequences(&bench.read(presence_query(&key))), [2]);
}
