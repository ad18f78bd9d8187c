//! What a client has on its connection, to be asked for again on the next one: attached channels and own members.

use std::collections::BTreeMap;

use fanfare_proto::frame::{Attach, Body, Incoming, PresenceRequest};
use serde_json::value::RawValue;

#[derive(Default)]
pub(crate) struct Standing {
    channels: BTreeMap<String, Attachment>,
    members: BTreeMap<Member, Option<Box<RawValue>>>,
    /// Of the connection: the name of a member that is given none.
    client_id: Option<String>,
}

struct Attachment {
    /// The application was given all up to here.
    serial: String,
    modes: Option<Vec<String>>,
    occupancy: bool,
    /// A detach is under way.
    leaving: bool,
}

/// Channel and client id.
type Member = (String, Option<String>);

impl Standing {
    pub(crate) fn connected(&mut self, client_id: Option<&str>) {
        self.client_id = client_id.map(Into::into);
    }

    /// A request is on its way.
    pub(crate) fn asked(&mut self, body: &Body) {
        self.leave(body, true);
    }

    /// The node has refused it.
    pub(crate) fn refused(&mut self, body: &Body) {
        self.leave(body, false);
    }

    fn leave(&mut self, body: &Body, leaving: bool) {
        if let Body::Detach { channel } = body
            && let Some(attachment) = self.channels.get_mut(channel)
        {
            attachment.leaving = leaving;
        }
    }

    /// The node has done it.
    pub(crate) fn done(&mut self, body: &Body, answer: &Incoming) {
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

    /// The application was given what came with this serial, or the node says that it begins anew there.
    ///
    /// The serial of a presence event is no such place: it may come ahead of messages that were missed.
    pub(crate) fn moved(&mut self, channel: &str, serial: &str) {
        if let Some(attachment) = self.channels.get_mut(channel) {
            attachment.serial.clear();
            attachment.serial.push_str(serial);
        }
    }

    pub(crate) fn detached(&mut self, channel: &str) {
        self.channels.remove(channel);
    }

    /// Whether what the library asks of itself is still wanted.
    pub(crate) fn wants(&self, body: &Body) -> bool {
        match body {
            Body::Attach(attach) => self.channels.get(&attach.channel).is_some_and(|one| !one.leaving),
            Body::Presence(presence) => self.members.contains_key(&self.member(presence)),
            _ => false,
        }
    }

    /// What the library asked of itself was refused for good.
    pub(crate) fn forget(&mut self, body: &Body) {
        match body {
            Body::Attach(attach) => self.detached(&attach.channel),
            Body::Presence(presence) => drop(self.members.remove(&self.member(presence))),
            _ => {}
        }
    }

    /// All that is to be asked for on a fresh connection, beside the `open` requests, which decide on their members.
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

    fn attached(standing: &mut Standing, channel: &str, serial: &str) {
        let body = Body::Attach(Attach {
            channel: channel.into(),
            rewind: Some("10".into()),
            modes: Some(vec!["subscribe".into()]),
            occupancy: true,
            ..Attach::default()
        });
        standing.done(&body, &Incoming { serial: Some(serial.into()), ..Incoming::default() });
    }

    fn texts(standing: &Standing, open: &[Body]) -> Vec<String> {
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
        standing.requests(open.iter()).into_iter().map(text).collect()
    }

    #[test]
    fn reattach_uses_latest_serial_unless_detach_is_pending() {
        let mut standing = Standing::default();
        attached(&mut standing, "a", "s1");
        attached(&mut standing, "b", "s2");
        standing.moved("a", "s3");
        standing.moved("never", "s4");
        assert_eq!(texts(&standing, &[]), ["a after s3", "b after s2"]);
        let leave_a = Body::Detach { channel: "a".into() };
        standing.asked(&leave_a);
        assert_eq!(texts(&standing, &[]), ["b after s2"]);
        standing.refused(&leave_a);
        assert_eq!(texts(&standing, &[]), ["a after s3", "b after s2"]);
        standing.done(&leave_a, &Incoming::default());
        standing.detached("b");
        assert!(texts(&standing, &[]).is_empty());
    }

    #[test]
    fn members_enter_again_unless_a_request_under_way_decides() {
        let mut standing = Standing::default();
        standing.connected(Some("me"));
        for body in [presence("enter", None), presence("update", Some("me")), presence("enter", Some("ann"))]
        {
            standing.done(&body, &Incoming::default());
        }
        assert_eq!(texts(&standing, &[]), ["enter ann", "enter me"]);
        assert_eq!(texts(&standing, &[presence("leave", None)]), ["enter ann"]);
        standing.done(&presence("leave", Some("me")), &Incoming::default());
        assert_eq!(texts(&standing, &[]), ["enter ann"]);
        standing.forget(&presence("enter", Some("ann")));
        assert!(texts(&standing, &[]).is_empty());
    }
}
