//! Attach and detach: what a connection gets of a channel.

use fanfare_proto::frame::{self, Attached, ServerFrame, code};

use super::{Context, Output, Session};
use crate::model::{ChannelName, Operation, Stamp};

/// A channel that the connection is attached to, with the granted modes.
#[derive(Debug)]
pub(super) struct Attachment {
    channel: ChannelName,
    modes: Modes,
}

/// What op 9 will say beside the position.
#[derive(Debug, Clone)]
pub struct AttachReply {
    pub channel: ChannelName,
    id: Option<String>,
    modes: Modes,
    resumed: bool,
    warning: Option<&'static str>,
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

    fn delivers(self) -> bool {
        self.0 & 1 != 0
    }
}

impl Session {
    /// The position of the channel for an [`Output::Attach`], which op 9 tells the client, whatever was asked since.
    pub fn attached(&self, reply: &AttachReply, position: Stamp, out: &mut Vec<Output>) {
        let attached = Attached {
            id: reply.id.as_deref(),
            channel: reply.channel.as_str(),
            serial: &Self::serial_text(position),
            resumed: reply.resumed,
            presence: false,
            modes: &reply.modes.names(),
            warning: reply.warning,
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
        let modes = Modes(asked.0 & self.granted(&channel).0);
        if modes == Modes(0) {
            let error = "the capability covers none of the modes on this channel";
            return self.nack(id.as_deref(), code::CAPABILITY, error, None, out);
        }
        let place = self.place(&channel);
        match place {
            Ok(place) => self.attached[place].modes = modes,
            Err(_) if self.attached.len() >= cx.limits.attached_channels => {
                let error = format!("more than {} channels on one connection", cx.limits.attached_channels);
                return self.nack(id.as_deref(), code::LIMIT, &error, Some("channel_limit"), out);
            }
            Err(place) => self.attached.insert(place, Attachment { channel: channel.clone(), modes }),
        }
        let warning = attach.rewind.is_some().then_some("rewind is not available on this node");
        let reply = AttachReply { channel, id, modes, resumed: place.is_ok(), warning };
        out.push(Output::Attach { delivers: modes.delivers(), reply });
    }

    pub(super) fn detach(&mut self, channel: ChannelName, id: Option<&str>, out: &mut Vec<Output>) {
        self.send(&ServerFrame::Detached { id, channel: channel.as_str(), error: None, code: None }, out);
        if let Ok(place) = self.place(&channel) {
            self.attached.remove(place);
            out.push(Output::Detach { channel });
        }
    }

    /// What is attached, sorted by name.
    pub fn channels(&self) -> impl Iterator<Item = &ChannelName> {
        self.attached.iter().map(|attachment| &attachment.channel)
    }

    /// Takes from what is attached all that the present capability does not grant.
    pub(super) fn narrow(&mut self, out: &mut Vec<Output>) {
        let mut place = 0;
        while place < self.attached.len() {
            let channel = self.attached[place].channel.clone();
            let before = self.attached[place].modes;
            let modes = Modes(before.0 & self.granted(&channel).0);
            if modes == Modes(0) {
                self.attached.remove(place);
                let error = Some("the capability no longer covers this channel");
                let code = Some(code::CAPABILITY);
                self.send(&ServerFrame::Detached { id: None, channel: channel.as_str(), error, code }, out);
                out.push(Output::Detach { channel });
                continue;
            }
            if modes != before {
                self.attached[place].modes = modes;
                let reply = AttachReply { channel, id: None, modes, resumed: true, warning: None };
                out.push(Output::Attach { delivers: modes.delivers(), reply });
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
