//! Attach and detach: what a connection gets of a channel.

use fanfare_proto::frame::{self, Attached, ServerFrame, code};
use fanfare_proto::serial::Serial;

use super::rewind::Rewind;
use super::{Context, Leaving, Output, PublishResult, Session};
use crate::model::{ChannelName, Operation};
use crate::telemetry::{Limit, count_loss};

/// A channel that the connection is attached to, with the granted modes.
#[derive(Debug)]
pub(super) struct Attachment {
    channel: ChannelName,
    modes: Modes,
    /// The credential may publish there, whatever the modes are.
    publishes: bool,
    /// The client is told how many are at the channel.
    watches: bool,
}

/// What op 9 will say beside the position.
#[derive(Debug, Clone)]
pub struct AttachReply {
    pub channel: ChannelName,
    id: Option<String>,
    modes: Modes,
    /// In the channel's lane, when what comes after it waits for the answer.
    ticket: Option<u64>,
    is_rewind: bool,
}

impl AttachReply {
    /// Continuity was not asked for.
    pub fn is_rewind(&self) -> bool {
        self.is_rewind
    }
}

/// Where the delivery of an attach begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begin {
    /// After all that was published before.
    Now,
    /// After this position of the client, if it can still be told what follows it.
    After(Serial),
    /// Some messages before now.
    Back(Rewind),
    /// Where it is: the channel was attached before.
    Kept,
}

/// Where the connection stands in a channel.
#[derive(Debug, Clone)]
pub struct Standing {
    /// The position before the first frame that follows.
    pub position: Serial,
    /// Nothing is missing between the client's position and this one.
    pub resumed: bool,
    pub warning: Option<&'static str>,
}

/// A set of `subscribe`, `publish`, `presence`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Modes(u8);

const MODES: [(&str, Operation); 3] =
    [("subscribe", Operation::Subscribe), ("publish", Operation::Publish), ("presence", Operation::Presence)];

impl Modes {
    const ALL: Self = Self(0b111);

    fn parse(names: &[String]) -> Option<Self> {
        names.iter().try_fold(Self(0), |modes, name| {
            let bit = MODES.iter().position(|(mode, _)| mode == name)?;
            Some(Self(modes.0 | 1 << bit))
        })
    }

    fn names(self) -> Vec<&'static str> {
        let held = MODES.iter().enumerate().filter(|(bit, _)| self.0 & (1 << bit) != 0);
        held.map(|(_, (name, _))| *name).collect()
    }

    fn holds(self, mode: Operation) -> bool {
        MODES.iter().position(|(_, operation)| *operation == mode).is_some_and(|bit| self.0 & (1 << bit) != 0)
    }

    fn delivers(self) -> bool {
        self.holds(Operation::Subscribe) || self.holds(Operation::Presence)
    }
}

impl Session {
    /// Whether the channel is still attached with something that is delivered.
    pub fn is_delivered(&self, channel: &ChannelName) -> bool {
        self.place(channel).is_ok_and(|place| self.attached[place].modes.delivers())
    }

    /// The outcome of an [`Output::Attach`], and whether a member list follows, which op 9 tells the client, whatever was
    /// asked since.
    pub fn attached(
        &mut self,
        cx: Context<'_>,
        reply: &AttachReply,
        standing: &Standing,
        presence: bool,
        out: &mut Vec<Output>,
    ) {
        let Some(ticket) = reply.ticket else { return self.say_attached(reply, standing, presence, out) };
        // The capability may have been narrowed while the answer was looked for.
        let modes = self.place(&reply.channel).map_or(Modes(0), |place| self.attached[place].modes);
        let result = if modes == Modes(0) {
            let error = "the capability no longer covers this channel".to_owned();
            PublishResult::Refused { code: code::CAPABILITY, error, reason: None }
        } else {
            self.say_attached(&AttachReply { modes, ..reply.clone() }, standing, presence, out);
            PublishResult::Said
        };
        self.answered(cx, ticket, result, out);
    }

    /// Tells a client that did not ask that what it was to be given is not there any more; delivery goes on from here.
    pub fn continuity_lost(
        &self,
        channel: &ChannelName,
        position: Serial,
        presence: bool,
        out: &mut Vec<Output>,
    ) {
        let Ok(place) = self.place(channel) else { return };
        count_loss();
        let modes = self.attached[place].modes;
        let reply = AttachReply { channel: channel.clone(), id: None, modes, ticket: None, is_rewind: false };
        self.say_attached(&reply, &Standing { position, resumed: false, warning: None }, presence, out);
    }

    fn say_attached(&self, reply: &AttachReply, standing: &Standing, presence: bool, out: &mut Vec<Output>) {
        let attached = Attached {
            id: reply.id.as_deref(),
            channel: reply.channel.as_str(),
            serial: &standing.position.to_string(),
            resumed: standing.resumed,
            presence,
            modes: &reply.modes.names(),
            warning: standing.warning,
        };
        out.push(Output::Frame(frame::encode(&ServerFrame::Attached(attached), self.format)));
    }

    pub(super) fn attach(
        &mut self,
        cx: Context<'_>,
        channel: ChannelName,
        id: Option<String>,
        attach: &frame::Attach,
        out: &mut Vec<Output>,
    ) {
        let asked = match attach.modes.as_deref().map(Modes::parse) {
            None => Modes::ALL,
            Some(Some(modes)) => modes,
            Some(None) => {
                let error = "modes holds something else than subscribe, publish and presence";
                return self.nack(id.as_deref(), code::BAD_REQUEST, error, None, out);
            }
        };
        let granted = self.granted(&channel);
        let (modes, publishes) = (Modes(asked.0 & granted.0), granted.holds(Operation::Publish));
        if modes == Modes(0) {
            let error = "the capability covers none of the modes on this channel";
            return self.nack(id.as_deref(), code::CAPABILITY, error, None, out);
        }
        if attach.occupancy && !granted.delivers() {
            let error = "occupancy needs the capability subscribe or presence on this channel";
            return self.nack(id.as_deref(), code::CAPABILITY, error, None, out);
        }
        let history = self.principal.allows(channel.as_str(), Operation::History);
        let rewind = attach.rewind.as_deref().map(|text| Rewind::parse(text, history, cx)).transpose();
        let rewind = match rewind {
            Ok(rewind) => rewind.filter(|_| modes.holds(Operation::Subscribe)),
            Err(refused) => return self.answer(id.as_deref(), refused, out),
        };
        let place = self.place(&channel);
        let was_delivered = self.is_delivered(&channel);
        match place {
            Ok(place) => {
                let attachment = &mut self.attached[place];
                (attachment.modes, attachment.watches) = (modes, attach.occupancy);
            }
            Err(_) if self.attached.len() >= cx.limits.attached_channels => {
                Limit::AttachedChannels.hit();
                let error = format!("more than {} channels on one connection", cx.limits.attached_channels);
                return self.nack(id.as_deref(), code::LIMIT, &error, Some("channel_limit"), out);
            }
            Err(place) => {
                // Most connections have one channel.
                self.attached.reserve_exact(usize::from(self.attached.is_empty()));
                self.attached.insert(
                    place,
                    Attachment { channel: channel.clone(), modes, publishes, watches: attach.occupancy },
                );
            }
        }
        // A serial that cannot be read is no position: delivery begins now, and the client is told so.
        let after = attach.serial.as_deref().and_then(|text| text.parse().ok());
        let begin = match (place, attach.serial.is_some(), after, rewind) {
            (Ok(_), ..) => Begin::Kept,
            (Err(_), true, Some(position), _) => Begin::After(position),
            (Err(_), false, _, Some(rewind)) => Begin::Back(rewind),
            (Err(_), ..) => Begin::Now,
        };
        let waits = cx.is_clustered && modes.delivers() && !was_delivered;
        let is_looked_for = waits || matches!(begin, Begin::After(_) | Begin::Back(_));
        let ticket = is_looked_for.then(|| self.begin_in_lane(&channel, id.clone()));
        let is_rewind = matches!(begin, Begin::Back(_));
        let reply = AttachReply { channel, id, modes, ticket, is_rewind };
        out.push(Output::Attach { delivers: modes.delivers(), begin, reply });
    }

    pub(super) fn detach(&mut self, channel: ChannelName, id: Option<&str>, out: &mut Vec<Output>) {
        self.send(&ServerFrame::Detached { id, channel: channel.as_str(), error: None, code: None }, out);
        if let Ok(place) = self.place(&channel) {
            self.attached.remove(place);
            out.push(Output::Detach { channel });
        }
    }

    /// Whether messages, and whether presence, of a channel are delivered.
    pub fn takes(&self, channel: &ChannelName) -> (bool, bool) {
        let modes = self.place(channel).map_or(Modes(0), |place| self.attached[place].modes);
        (modes.holds(Operation::Subscribe), modes.holds(Operation::Presence))
    }

    /// Whether the credential may publish on a channel that is attached.
    pub fn publishes(&self, channel: &ChannelName) -> bool {
        self.place(channel).is_ok_and(|place| self.attached[place].publishes)
    }

    /// Whether the client is to be told how many are at an attached channel.
    pub fn watches(&self, channel: &ChannelName) -> bool {
        self.place(channel).is_ok_and(|place| self.attached[place].watches)
    }

    /// Whether the channel is attached, and nothing of it is delivered.
    pub fn is_silent(&self, channel: &ChannelName) -> bool {
        self.place(channel).is_ok_and(|place| !self.attached[place].modes.delivers())
    }

    /// What is attached, sorted by name.
    pub fn channels(&self) -> impl Iterator<Item = &ChannelName> {
        self.attached.iter().map(|attachment| &attachment.channel)
    }

    /// Takes from what is attached all that the present capability does not grant.
    pub(super) fn narrow(&mut self, out: &mut Vec<Output>) {
        out.push(Output::Leave(Leaving::NotGranted));
        let mut place = 0;
        while place < self.attached.len() {
            let channel = self.attached[place].channel.clone();
            let Attachment { modes: before, publishes: published, watches: watched, .. } =
                self.attached[place];
            let granted = self.granted(&channel);
            let (modes, publishes) = (Modes(before.0 & granted.0), granted.holds(Operation::Publish));
            if modes == Modes(0) {
                self.attached.remove(place);
                let error = Some("the capability no longer covers this channel");
                let code = Some(code::CAPABILITY);
                self.send(&ServerFrame::Detached { id: None, channel: channel.as_str(), error, code }, out);
                out.push(Output::Detach { channel });
                continue;
            }
            let watches = watched && granted.delivers();
            (self.attached[place].publishes, self.attached[place].watches) = (publishes, watches);
            if modes != before {
                self.attached[place].modes = modes;
                let reply = AttachReply { channel, id: None, modes, ticket: None, is_rewind: false };
                out.push(Output::Attach { delivers: modes.delivers(), begin: Begin::Kept, reply });
            } else if (publishes, watches) != (published, watched) {
                out.push(Output::Recount { channel });
            }
            place += 1;
        }
    }

    fn granted(&self, channel: &ChannelName) -> Modes {
        let allowed = MODES.iter().enumerate();
        let allowed =
            allowed.filter(|(_, (_, operation))| self.principal.allows(channel.as_str(), *operation));
        Modes(allowed.fold(0, |bits, (bit, _)| bits | 1 << bit))
    }

    fn place(&self, channel: &ChannelName) -> Result<usize, usize> {
        self.attached.binary_search_by(|attachment| attachment.channel.cmp(channel))
    }
}
