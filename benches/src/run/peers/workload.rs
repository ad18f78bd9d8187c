use clap::ValueEnum;
use serde::Serialize;

use super::contender::Contender;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// One channel with very many subscribers and few publishes.
    W1,
    /// Many channels at a given rate.
    W2,
    /// Many channels at a given rate, with subscribers in groups that have all their channels in common.
    W2Groups,
    /// The channels of W2 at the highest rate that a server carries.
    Most,
    /// Very many connections that receive only heartbeats.
    W3,
    /// Connections that come in turn and at once, until they are attached.
    W4,
    /// Durable publishes.
    W5,
    /// Many connections with several channels each, which no other connection has.
    W6,
    /// A hundred subscribers, of which one reads nothing.
    W7,
}

impl Part {
    /// Whether the part has a row for the contender.
    pub(super) fn measures(self, contender: Contender) -> bool {
        match self {
            Self::W1 | Self::W2 | Self::W2Groups => true,
            // Each row is a search. Left out are contenders that no bar refers to and that are not the fastest.
            Self::Most => !matches!(
                contender,
                Contender::Baseline | Contender::BaselineTwoThreads | Contender::FanfareOneThread
            ),
            Self::W3 | Self::W4 | Self::W6 => contender.is_plain(),
            // None of the others stores messages.
            Self::W5 => contender == Contender::Fanfare,
            // The baseline closes a connection that it cannot write to, so it has no slow reader.
            Self::W7 => contender.is_plain() && contender != Contender::Baseline,
        }
    }
}

/// Workload: subscribers, channels, rate and size of messages.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Workload {
    pub(super) subscribers: u32,
    pub(super) channels: u32,
    /// Channels per subscriber.
    pub(super) attached: u32,
    /// Whether subscribers come in groups that have all their channels in common; otherwise the channels are random.
    pub(super) groups: bool,
    /// Connections that publish.
    pub(super) publishers: u32,
    pub(super) deliveries_per_s: u32,
    pub(super) message_bytes: u32,
}

pub(super) const W1_SUBSCRIBERS: [u32; 2] = [5_000, 10_000];
const W1_MESSAGES_PER_S: u32 = 2;
const W1_BYTES: u32 = 128;
pub(super) const W2_DELIVERIES_PER_S: [u32; 2] = [100_000, 400_000];
pub(super) const W2_BYTES: [u32; 2] = [128, 1024];

/// Gives the workloads of a given rate, for the parts that were asked for.
pub(super) fn of_parts(asked: impl Fn(Part) -> bool) -> Vec<Workload> {
    let mut all = Vec::new();
    if asked(Part::W1) {
        all.extend(W1_SUBSCRIBERS.map(one_channel));
    }
    for (part, groups) in [(Part::W2, false), (Part::W2Groups, true)] {
        let of_bytes =
            |bytes| W2_DELIVERIES_PER_S.map(|rate| Workload { groups, ..many_channels(rate, bytes) });
        all.extend(W2_BYTES.into_iter().filter(|_| asked(part)).flat_map(of_bytes));
    }
    all
}

fn one_channel(subscribers: u32) -> Workload {
    Workload {
        subscribers,
        channels: 1,
        attached: 1,
        groups: false,
        publishers: 1,
        deliveries_per_s: subscribers * W1_MESSAGES_PER_S,
        message_bytes: W1_BYTES,
    }
}

/// Makes a workload with 80 subscribers for each channel, and so many publishers that no server needs one thread to
/// read them all.
pub(super) fn many_channels(deliveries_per_s: u32, message_bytes: u32) -> Workload {
    let (subscribers, channels, attached, publishers) = (500, 125, 20, 10);
    Workload { subscribers, channels, attached, groups: false, publishers, deliveries_per_s, message_bytes }
}

/// Makes a workload of a hundred subscribers with as many deliveries as W2 at its lower rate, with messages so large
/// that buffers fill.
pub(super) fn hundred() -> Workload {
    Workload { subscribers: 100, channels: 25, ..many_channels(W2_DELIVERIES_PER_S[0], W2_BYTES[1]) }
}

/// Subscribers that read.
#[derive(Clone, Copy)]
pub(super) enum Reading {
    All,
    AllButOne,
}

impl Workload {
    /// Messages per second over all channels.
    pub(super) fn messages_per_s(&self) -> f64 {
        let fan_out = f64::from(self.subscribers) * f64::from(self.attached) / f64::from(self.channels);
        f64::from(self.deliveries_per_s) / fan_out
    }

    pub(super) fn title(&self) -> String {
        let Self { subscribers, channels, attached, groups, deliveries_per_s, message_bytes, .. } = self;
        let listening = match channels {
            1 => format!("1 channel × {subscribers}"),
            _ if *groups => format!("{subscribers} × {attached} of {channels} channels, in groups"),
            _ => format!("{subscribers} × {attached} of {channels} channels"),
        };
        format!("{listening}, {deliveries_per_s} deliveries/s, {message_bytes} B")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_of_the_deliveries() {
        assert_eq!(one_channel(5_000).messages_per_s(), 2.0);
        assert_eq!(many_channels(400_000, 128).messages_per_s(), 5_000.0);
    }

    #[test]
    fn the_node_has_a_row_in_each_part() {
        assert!(Part::value_variants().iter().all(|part| part.measures(Contender::Fanfare)));
        assert!(!Part::W7.measures(Contender::Baseline) && !Part::W5.measures(Contender::Nats));
        assert!(Part::Most.measures(Contender::FanfareWindow0) && !Part::Most.measures(Contender::Baseline));
    }

    #[test]
    fn only_the_parts_asked_for_are_measured() {
        assert_eq!(of_parts(|_| true).len(), 10);
        assert!(of_parts(|part| part == Part::W2Groups).iter().all(|workload| workload.groups));
        assert_eq!(of_parts(|part| part == Part::W1).len(), 2);
        assert!(of_parts(|part| part == Part::Most).is_empty());
    }
}
