//! Paged member list under change: a slow reader ends with the final list.

use std::collections::BTreeMap;

use fanfare_proto::frame::{Format, Incoming, parse_server};
use serde_json::value::RawValue;

use super::*;
use crate::model::{ClientId, Limits, MemberId, PresenceAction, PresenceEvent, RestoredMember, SessionOwner};

fn member(n: usize) -> MemberId {
    MemberId {
        connection_id: ConnectionId::from_bytes([(n % 251) as u8; 16]),
        client_id: ClientId::of(&format!("client-{n}")),
    }
}

fn change(hub: &Hub, n: usize, action: PresenceAction, data: &str) {
    let data = Some(Arc::from(RawValue::from_string(data.to_owned()).unwrap()));
    let change = PresenceChange { member: member(n), epoch: 0, action, data };
    hub.present(&key("a"), change, &Limits::default(), |action, data, stamp| {
        PresenceEvent::new(key("a"), member(n), 0, action, data, stamp)
    })
    .unwrap();
}

fn read(frame: &[u8]) -> Incoming {
    let head = match frame[1] {
        126 => 4,
        127 => 10,
        _ => 2,
    };
    let format = if frame[0] == 0x81 { Format::Json } else { Format::MsgPack };
    parse_server(format, &frame[head..]).unwrap()
}

/// A client's view of the members: replaced by the list, then changed by events.
#[derive(Default)]
struct MemberListView {
    members: BTreeMap<String, String>,
    seen: Vec<(String, String)>,
}

impl MemberListView {
    fn take(&mut self, frame: &[u8]) -> bool {
        let incoming = read(frame);
        for member in incoming.members {
            let data = member.data.unwrap().get().to_owned();
            let previous = self.members.insert(member.client_id.clone(), data);
            assert_eq!(previous, None, "{} stands on two pages", member.client_id);
        }
        if let Some(events) = incoming.presence {
            let events: Vec<fanfare_proto::frame::PresenceIn> = serde_json::from_str(events.get()).unwrap();
            for event in events {
                let data = event.data.unwrap().get().to_owned();
                self.seen.push((event.action.clone(), event.client_id.clone()));
                match event.action.as_str() {
                    "leave" => self.members.remove(&event.client_id),
                    _ => self.members.insert(event.client_id, data),
                };
            }
        }
        incoming.more == Some(false)
    }
}

#[test]
fn pages_are_bounded_and_hold_everybody_once() {
    let (hub, _) = hub_of(1, Clock::manual(NOW_MS));
    for n in 0..600 {
        change(&hub, n, PresenceAction::Enter, &format!("\"{}\"", "x".repeat(200 + n)));
    }
    let (channel, _) = hub.attach(&key("a"), 0);
    for format in [Format::Json, Format::MsgPack] {
        let (mut view, mut sync) = (MemberListView::default(), MemberSync::default());
        for count in 1.. {
            let page = hub.presence_page(&channel, format, sync.after());
            assert!(page.frame.len() <= 64 * 1024 + 10, "{}", page.frame.len());
            sync.sent(&page);
            if view.take(&page.frame) {
                assert!(count > 4, "{count} pages");
                break;
            }
        }
        assert!(sync.is_sent());
        assert_eq!(view.members.len(), 600);
    }
    let page = hub.presence_page(&channel, Format::Json, None);
    let again = hub.presence_page(&channel, Format::Json, None);
    assert_eq!(page.frame.as_ptr(), again.frame.as_ptr(), "one encoding for all newcomers");
    change(&hub, 0, PresenceAction::Leave, "0");
    assert_ne!(page.frame, hub.presence_page(&channel, Format::Json, None).frame);
}

#[test]
fn presence_list_pulled_during_changes_is_exact_and_events_once() {
    for seed in 0..200_u64 {
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = move |below: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random % below as u64) as usize
        };
        let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
        let long = "x".repeat(15_000);
        for n in 0..20 {
            change(&hub, n, PresenceAction::Enter, &format!("\"{long}\""));
        }
        let (channel, _) = hub.attach(&key("a"), 0);
        assert!(hub.presence_state(&channel).0);
        let (mut view, mut sync, mut taken) = (MemberListView::default(), MemberSync::default(), 0);
        let mut changed = 0;
        while changed < 30 || !sync.is_sent() || taken < targets[0].presence.lock().len() {
            match next(3) {
                0 if changed < 30 => {
                    changed += 1;
                    let action = [PresenceAction::Update, PresenceAction::Leave][next(2)];
                    change(&hub, next(24), action, &changed.to_string());
                }
                1 if !sync.is_sent() => {
                    let page = hub.presence_page(&channel, Format::Json, sync.after());
                    let held = sync.sent(&page);
                    view.take(&page.frame);
                    for delivery in held {
                        view.take(&delivery.frame(Format::Json));
                    }
                }
                _ => {
                    let delivery = targets[0].presence.lock().get(taken).cloned();
                    let Some(delivery) = delivery else { continue };
                    taken += 1;
                    if sync.judge(&delivery) == SyncVerdict::Send {
                        assert!(sync.is_sent(), "no event before the end of the list");
                        view.take(&delivery.frame(Format::Json));
                    }
                }
            }
        }
        let is: BTreeMap<String, String> = hub
            .members(&key("a"))
            .into_iter()
            .map(|(id, member)| (id.client_id.as_str().to_owned(), member.data.unwrap().get().to_owned()))
            .collect();
        assert_eq!(view.members, is, "seed {seed}");
        assert!(view.seen.len() <= 30);
    }
}

#[test]
fn a_channel_with_members_lives_and_is_forgotten_with_the_last() {
    let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
    change(&hub, 1, PresenceAction::Enter, "1");
    change(&hub, 2, PresenceAction::Enter, "1");
    assert_eq!((hub.channel_count(), hub.channel_member_counts(key("a").account())[0].1), (1, 2));
    change(&hub, 1, PresenceAction::Leave, "1");
    change(&hub, 2, PresenceAction::Leave, "1");
    assert_eq!((hub.channel_count(), hub.channel_member_counts(key("a").account()).len()), (0, 0));
    let (channel, _) = hub.attach(&key("a"), 0);
    let (follows, last_sequence) = hub.presence_state(&channel);
    assert!(!follows);
    change(&hub, 1, PresenceAction::Enter, "1");
    assert!(targets[0].presence.lock()[0].event.sequence > last_sequence);
    assert_eq!(hub.members(&key("a")).len(), 1);
}

#[test]
fn restored_member_uses_presence_bytes_until_it_leaves() {
    let (hub, _) = hub_of(1, Clock::manual(NOW_MS));
    let text = format!("\"{}\"", "x".repeat(10_000));
    let data = Some(Arc::from(RawValue::from_string(text).expect("JSON")));
    let epoch = 3;
    hub.restore(RestoredMember { key: key("a"), member: member(1), epoch, data, timestamp_ms: 5 });
    let limits = Limits { presence_bytes: 10_000, ..Limits::default() };
    let enter = || {
        let change =
            PresenceChange { member: member(2), epoch: 0, action: PresenceAction::Enter, data: None };
        hub.present(&key("a"), change, &limits, |action, data, stamp| {
            PresenceEvent::new(key("a"), member(2), 0, action, data, stamp)
        })
    };
    assert!(enter().is_err(), "the former member has it all, and more");
    let owner = SessionOwner { epoch, incarnation: hub.incarnation() };
    hub.remove_lost_member(&key("a"), member(1), owner, hub.presence_sequence(), |action, data, stamp| {
        PresenceEvent::new(key("a"), member(1), epoch, action, data, stamp)
    });
    assert!(enter().is_ok());
}
