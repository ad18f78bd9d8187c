//! Attach and detach: what a connection receives of a channel.

use fanfare_proto::frame::{self, Attached, ServerFrame, code};
use fanfare_proto::serial::Serial;

use super::rewind::Rewind;
use super::{Context, LeaveScope, Output, PublishResult, Session};
use crate::model::{ChannelName, Operation};
use crate::telemetry::{Limit, count_loss};

/// An attached channel with the granted modes.
#[derive(Debug)]
pub(super) struct Attachment {
    channel: ChannelName,
    modes: Modes,
    /// True if the credential may publish there, whatever the modes are.
    publishes: bool,
    /// True if the client watches the channel's occupancy.
    watches: bool,
}

/// Content of op 9 beside the position.
#[derive(Debug, Clone)]
pub struct AttachReply {
    pub channel: ChannelName,
    id: Option<String>,
    modes: Modes,
    /// Ticket in the channel's request queue, if later requests wait for this answer.
    ticket: Option<u64>,
    is_rewind: bool,
}

impl AttachReply {
    /// True if the attach asked for a rewind and not for continuity.
    pub fn is_rewind(&self) -> bool {
        self.is_rewind
    }
}

/// Start of the delivery after an attach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeliveryStart {
    /// Now: only later messages.
    Now,
    /// Resume after this position of the client, if its missed messages can be found.
    After(Serial),
    /// Rewind to some messages before now.
    Rewind(Rewind),
    /// Unchanged: the channel was attached before.
    Unchanged,
}

/// Outcome of an attach.
#[derive(Debug, Clone)]
pub struct AttachOutcome {
    /// Position before the first frame that follows.
    pub position: Serial,
    /// True if no message is missing between the client's position and this one.
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
    /// True if the channel is still attached with any delivery.
    pub fn is_delivered(&self, channel: &ChannelName) -> bool {
        self.find_attachment(channel).is_ok_and(|index| self.attached[index].modes.delivers())
    }

    /// Completes an [`Output::Attach`]. Op 9 tells the client the outcome, and whether a member list follows, whatever was requested since.
    pub fn attached(
        &mut self,
        cx: Context<'_>,
        reply: &AttachReply,
        outcome: &AttachOutcome,
        presence: bool,
        out: &mut Vec<Output>,
    ) {
        let Some(ticket) = reply.ticket else { return self.send_attached(reply, outcome, presence, out) };
        // The capability may have been narrowed while the start was searched.
        let modes = self.find_attachment(&reply.channel).map_or(Modes(0), |index| self.attached[index].modes);
        let result = if modes == Modes(0) {
            let error = "the capability no longer covers this channel".to_owned();
            PublishResult::Refused { code: code::CAPABILITY, error, reason: None }
        } else {
            self.send_attached(&AttachReply { modes, ..reply.clone() }, outcome, presence, out);
            PublishResult::AlreadyAnswered
        };
        self.answered(cx, ticket, result, out);
    }

    /// Tells a client of a continuity loss outside an attach; delivery continues from this position.
    pub fn continuity_lost(
        &self,
        channel: &ChannelName,
        position: Serial,
        presence: bool,
        out: &mut Vec<Output>,
    ) {
        let Ok(index) = self.find_attachment(channel) else { return };
        count_loss();
        let modes = self.attached[index].modes;
        let reply = AttachReply { channel: channel.clone(), id: None, modes, ticket: None, is_rewind: false };
        self.send_attached(&reply, &AttachOutcome { position, resumed: false, warning: None }, presence, out);
    }

    fn send_attached(
        &self,
        reply: &AttachReply,
        outcome: &AttachOutcome,
        presence: bool,
        out: &mut Vec<Output>,
    ) {
        let attached = Attached {
            id: reply.id.as_deref(),
            channel: reply.channel.as_str(),
            serial: &outcome.position.to_string(),
            resumed: outcome.resumed,
            presence,
            modes: &reply.modes.names(),
            warning: outcome.warning,
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
        let requested = match attach.modes.as_deref().map(Modes::parse) {
            None => Modes::ALL,
            Some(Some(modes)) => modes,
            Some(None) => {
                let error = "modes holds something else than subscribe, publish and presence";
                return self.nack(id.as_deref(), code::BAD_REQUEST, error, None, out);
            }
        };
        let granted = self.granted(&channel);
        let (modes, publishes) = (Modes(requested.0 & granted.0), granted.holds(Operation::Publish));
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
        let index = self.find_attachment(&channel);
        let was_delivered = self.is_delivered(&channel);
        match index {
            Ok(index) => {
                let attachment = &mut self.attached[index];
                (attachment.modes, attachment.watches) = (modes, attach.occupancy);
            }
            Err(_) if self.attached.len() >= cx.limits.attached_channels => {
                Limit::AttachedChannels.hit();
                let error = format!("more than {} channels on one connection", cx.limits.attached_channels);
                return self.nack(id.as_deref(), code::LIMIT, &error, Some("channel_limit"), out);
            }
            Err(index) => {
                // Most connections have one channel.
                self.attached.reserve_exact(usize::from(self.attached.is_empty()));
                self.attached.insert(
                    index,
                    Attachment { channel: channel.clone(), modes, publishes, watches: attach.occupancy },
                );
            }
        }
        // An unreadable serial is no position: delivery starts now, and the client is told so.
        let after = attach.serial.as_deref().and_then(|text| text.parse().ok());
        let begin = match (index, attach.serial.is_some(), after, rewind) {
            (Ok(_), ..) => DeliveryStart::Unchanged,
            (Err(_), true, Some(position), _) => DeliveryStart::After(position),
            (Err(_), false, _, Some(rewind)) => DeliveryStart::Rewind(rewind),
            (Err(_), ..) => DeliveryStart::Now,
        };
        let waits = cx.is_clustered && modes.delivers() && !was_delivered;
        let is_looked_for = waits || matches!(begin, DeliveryStart::After(_) | DeliveryStart::Rewind(_));
        let ticket = is_looked_for.then(|| self.begin_in_queue(&channel, id.clone()));
        let is_rewind = matches!(begin, DeliveryStart::Rewind(_));
        let reply = AttachReply { channel, id, modes, ticket, is_rewind };
        out.push(Output::Attach { delivers: modes.delivers(), begin, reply });
    }

    pub(super) fn detach(&mut self, channel: ChannelName, id: Option<&str>, out: &mut Vec<Output>) {
        self.send(&ServerFrame::Detached { id, channel: channel.as_str(), error: None, code: None }, out);
        if let Ok(index) = self.find_attachment(&channel) {
            self.attached.remove(index);
            out.push(Output::Detach { channel });
        }
    }

    /// Whether messages, and whether presence, of a channel are delivered.
    pub fn takes(&self, channel: &ChannelName) -> (bool, bool) {
        let modes = self.find_attachment(channel).map_or(Modes(0), |index| self.attached[index].modes);
        (modes.holds(Operation::Subscribe), modes.holds(Operation::Presence))
    }

    /// Whether the credential may publish on a channel that is attached.
    pub fn publishes(&self, channel: &ChannelName) -> bool {
        self.find_attachment(channel).is_ok_and(|index| self.attached[index].publishes)
    }

    /// True if the client watches the occupancy of an attached channel.
    pub fn watches(&self, channel: &ChannelName) -> bool {
        self.find_attachment(channel).is_ok_and(|index| self.attached[index].watches)
    }

    /// True if the channel is attached without any delivery.
    pub fn is_silent(&self, channel: &ChannelName) -> bool {
        self.find_attachment(channel).is_ok_and(|index| !self.attached[index].modes.delivers())
    }

    /// Attached channels, sorted by name.
    pub fn channels(&self) -> impl Iterator<Item = &ChannelName> {
        self.attached.iter().map(|attachment| &attachment.channel)
    }

    /// Removes modes that the present capability does not grant from all attached channels.
    pub(super) fn narrow(&mut self, out: &mut Vec<Output>) {
        out.push(Output::Leave(LeaveScope::NotGranted));
        let mut index = 0;
        while index < self.attached.len() {
            let channel = self.attached[index].channel.clone();
            let Attachment { modes: before, publishes: published, watches: watched, .. } =
                self.attached[index];
            let granted = self.granted(&channel);
            let (modes, publishes) = (Modes(before.0 & granted.0), granted.holds(Operation::Publish));
            if modes == Modes(0) {
                self.attached.remove(index);
                let error = Some("the capability no longer covers this channel");
                let code = Some(code::CAPABILITY);
                self.send(&ServerFrame::Detached { id: None, channel: channel.as_str(), error, code }, out);
                out.push(Output::Detach { channel });
                continue;
            }
            let watches = watched && granted.delivers();
            (self.attached[index].publishes, self.attached[index].watches) = (publishes, watches);
            if modes != before {
                self.attached[index].modes = modes;
                let reply = AttachReply { channel, id: None, modes, ticket: None, is_rewind: false };
                out.push(Output::Attach {
                    delivers: modes.delivers(),
                    begin: DeliveryStart::Unchanged,
                    reply,
                });
            } else if (publishes, watches) != (published, watched) {
                out.push(Output::Recount { channel });
            }
            index += 1;
        }
    }

    fn granted(&self, channel: &ChannelName) -> Modes {
        let allowed = MODES.iter().enumerate();
        let allowed =
            allowed.filter(|(_, (_, operation))| self.principal.allows(channel.as_str(), *operation));
        Modes(allowed.fold(0, |bits, (bit, _)| bits | 1 << bit))
    }

    fn find_attachment(&self, channel: &ChannelName) -> Result<usize, usize> {
        self.attached.binary_search_by(|attachment| attachment.channel.cmp(channel))
    }
}
