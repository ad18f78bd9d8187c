//! The attached channels and own members of a client, which it asks for again on the next connection.

use std::collections::BTreeMap;

use fanfare_proto::frame::{Attach, Body, Incoming, PresenceRequest};
use serde_json::value::RawValue;

#[derive(Default)]
pub(crate) struct SessionState {
    channels: BTreeMap<String, Attachment>,
    members: BTreeMap<Member, Option<Box<RawValue>>>,
    /// Client id of the connection, for members without one of their own.
    client_id: Option<String>,
}

struct Attachment {
    /// Channel position up to which the application has the messages.
    serial: String,
    modes: Option<Vec<String>>,
    occupancy: bool,
    /// Whether a detach is under way.
    leaving: bool,
}

/// A member: channel and client id.
type Member = (String, Option<String>);

impl SessionState {
    pub(crate) fn connected(&mut self, client_id: Option<&str>) {
        self.client_id = client_id.map(Into::into);
    }

    /// Notes that a request is on its way.
    pub(crate) fn request_sent(&mut self, body: &Body) {
        self.leave(body, true);
    }

    /// Notes that the node has refused a request.
    pub(crate) fn request_refused(&mut self, body: &Body) {
        self.leave(body, false);
    }

    fn leave(&mut self, body: &Body, leaving: bool) {
        if let Body::Detach { channel } = body
            && let Some(attachment) = self.channels.get_mut(channel)
        {
            attachment.leaving = leaving;
        }
    }

    /// Notes that the node has carried out a request.
    pub(crate) fn request_done(&mut self, body: &Body, answer: &Incoming) {
        match body {
            Body::Attach(attach) => {
                let attachment = Attachment {
                    serial: answer.serial.clone().unwrap_or_default(),
                    modes: attach.modes.clone(),
                    occupancy: attach.occupancy,
                    leaving: false,
                };
                self.channels.insert(attach.channel.clone(), attachment);
            }
            Body::Detach { channel } => self.detached(channel),
            Body::Presence(presence) => {
                let member = self.member(presence);
                if presence.action == "leave" {
                    self.members.remove(&member);
                } else {
                    self.members.insert(member, presence.data.clone());
                }
            }
            _ => {}
        }
    }

    /// Moves a channel's position: the application has the messages up to the serial, or the node reports a
    /// continuity loss there.
    ///
    /// The serial of a presence event is no such position: it may be ahead of messages that were missed.
    pub(crate) fn set_serial(&mut self, channel: &str, serial: &str) {
        if let Some(attachment) = self.channels.get_mut(channel) {
            attachment.serial.clear();
            attachment.serial.push_str(serial);
        }
    }

    pub(crate) fn detached(&mut self, channel: &str) {
        self.channels.remove(channel);
    }

    /// Tells whether a request of the library itself is still wanted.
    pub(crate) fn still_needs(&self, body: &Body) -> bool {
        match body {
            Body::Attach(attach) => self.channels.get(&attach.channel).is_some_and(|one| !one.leaving),
            Body::Presence(presence) => self.members.contains_key(&self.member(presence)),
            _ => false,
        }
    }

    /// Drops the channel or member whose request of the library was refused for good.
    pub(crate) fn forget(&mut self, body: &Body) {
        match body {
            Body::Attach(attach) => self.detached(&attach.channel),
            Body::Presence(presence) => drop(self.members.remove(&self.member(presence))),
            _ => {}
        }
    }

    /// Gives all requests to make on a fresh connection, but for members that one of the `open` requests
    /// decides on.
    pub(crate) fn requests<'a>(&self, open: impl Iterator<Item = &'a Body>) -> Vec<Body> {
        let decided: Vec<Member> = open
            .filter_map(|body| match body {
                Body::Presence(presence) => Some(self.member(presence)),
                _ => None,
            })
            .collect();
        let staying = self.channels.iter().filter(|(_, attachment)| !attachment.leaving);
        let attaches = staying.map(|(channel, attachment)| {
            Body::Attach(Attach {
                channel: channel.clone(),
                rewind: None,
                serial: Some(attachment.serial.clone()),
                modes: attachment.modes.clone(),
                occupancy: attachment.occupancy,
            })
        });
        let members = self.members.iter().filter(|(member, _)| !decided.contains(member));
        let enters = members.map(|((channel, client_id), data)| {
            Body::Presence(PresenceRequest {
                channel: channel.clone(),
                action: "enter".into(),
                client_id: client_id.clone(),
                data: data.clone(),
            })
        });
        attaches.chain(enters).collect()
    }

    fn member(&self, presence: &PresenceRequest) -> Member {
        let client_id = presence.client_id.as_ref().or(self.client_id.as_ref());
        (presence.channel.clone(), client_id.cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn presence(action: &str, client_id: Option<&str>) -> Body {
        Body::Presence(PresenceRequest {
            channel: "room".into(),
            action: action.into(),
            client_id: client_id.map(Into::into),
            data: None,
        })
    }

    fn attached(state: &mut SessionState, channel: &str, serial: &str) {
        let body = Body::Attach(Attach {
            channel: channel.into(),
            rewind: Some("10".into()),
            modes: Some(vec!["subscribe".into()]),
            occupancy: true,
            ..Attach::default()
        });
        state.request_done(&body, &Incoming { serial: Some(serial.into()), ..Incoming::default() });
    }

    fn texts(state: &SessionState, open: &[Body]) -> Vec<String> {
        let text = |body| match body {
            Body::Attach(attach) => {
                assert_eq!((attach.rewind, attach.modes), (None, Some(vec!["subscribe".into()])));
                assert!(attach.occupancy);
                format!("{} after {}", attach.channel, attach.serial.unwrap_or_default())
            }
            Body::Presence(presence) => {
                format!("{} {}", presence.action, presence.client_id.unwrap_or_default())
            }
            _ => unreachable!("nothing else stands"),
        };
        state.requests(open.iter()).into_iter().map(text).collect()
    }

    #[test]
    fn reattach_uses_latest_serial_unless_detach_is_pending() {
        let mut state = SessionState::default();
        attached(&mut state, "a", "s1");
        attached(&mut state, "b", "s2");
        state.set_serial("a", "s3");
        state.set_serial("never", "s4");
        assert_eq!(texts(&state, &[]), ["a after s3", "b after s2"]);
        let leave_a = Body::Detach { channel: "a".into() };
        state.request_sent(&leave_a);
        assert_eq!(texts(&state, &[]), ["b after s2"]);
        state.request_refused(&leave_a);
        assert_eq!(texts(&state, &[]), ["a after s3", "b after s2"]);
        state.request_done(&leave_a, &Incoming::default());
        state.detached("b");
        assert!(texts(&state, &[]).is_empty());
    }

    #[test]
    fn members_enter_again_unless_a_request_under_way_decides() {
        let mut state = SessionState::default();
        state.connected(Some("me"));
        for body in [presence("enter", None), presence("update", Some("me")), presence("enter", Some("ann"))]
        {
            state.request_done(&body, &Incoming::default());
        }
        assert_eq!(texts(&state, &[]), ["enter ann", "enter me"]);
        assert_eq!(texts(&state, &[presence("leave", None)]), ["enter ann"]);
        state.request_done(&presence("leave", Some("me")), &Incoming::default());
        assert_eq!(texts(&state, &[]), ["enter ann"]);
        state.forget(&presence("enter", Some("ann")));
        assert!(texts(&state, &[]).is_empty());
    }
}
