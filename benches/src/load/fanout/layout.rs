//! Layout of a fan-out: the channels of each subscriber and of each message, computed from their numbers.

/// The same number of channels for each subscriber, and nearly the same number of subscribers for each channel.
pub(super) struct Layout {
    channels: usize,
    /// Channels per subscriber.
    attached: usize,
    /// Number of subscribers that read; they come first. Nothing is expected of the others.
    pub(super) reading: usize,
    /// Channels of all subscribers, one subscriber after another, in ascending order.
    subscribed: Vec<u32>,
}

impl Layout {
    /// Deals the channels like cards, from one shuffled pack after another. Two channels share a random number of
    /// subscribers, the same in each run.
    pub(super) fn by_chance(subscribers: usize, channels: usize, attached: usize, reading: usize) -> Self {
        let (mut chance, mut pack) = (Chance(0), Vec::new());
        let mut subscribed: Vec<u32> = Vec::with_capacity(subscribers * attached);
        for subscriber in 0..subscribers {
            let first = subscriber * attached;
            while subscribed.len() < first + attached {
                if pack.is_empty() {
                    pack = (0..channels as u32).collect();
                    chance.shuffle(&mut pack);
                }
                // A subscriber may have this channel from the former pack; it is left for the next subscriber.
                let next = pack.iter().rposition(|channel| !subscribed[first..].contains(channel));
                let next = next.expect("a whole pack has more channels than a subscriber gets");
                subscribed.push(pack.remove(next));
            }
            subscribed[first..].sort_unstable();
        }
        Self { channels, attached, reading, subscribed }
    }

    /// Gives each subscriber the channels after those of the one before, modulo `channels`. So subscribers form groups,
    /// and consecutive messages have the same subscribers.
    pub(super) fn in_groups(subscribers: usize, channels: usize, attached: usize, reading: usize) -> Self {
        let subscribed = (0..subscribers).flat_map(|subscriber| {
            let nth = |nth| ((subscriber * attached + nth) % channels) as u32;
            let mut own: Vec<u32> = (0..attached).map(nth).collect();
            own.sort_unstable();
            own
        });
        Self { channels, attached, reading, subscribed: subscribed.collect() }
    }

    /// Gives the name of a channel. All names have one length, so that all messages have one layout.
    pub(super) fn name(channel: u32) -> String {
        format!("bench:fanout:{channel:06}")
    }

    pub(super) fn channels(&self) -> usize {
        self.channels
    }

    /// Gives the channels of a subscriber, in the order of its subscriptions.
    pub(super) fn channels_of(&self, subscriber: usize) -> &[u32] {
        &self.subscribed[subscriber * self.attached..][..self.attached]
    }

    pub(super) fn subscriptions(&self) -> usize {
        self.subscribed.len()
    }

    /// Gives the channel of a message; the channels take turns.
    pub(super) fn channel_of(&self, sequence: u32) -> usize {
        sequence as usize % self.channels
    }

    /// Gives the subscription of this subscriber that a message is for, and the message's number within the
    /// channel; `None` if it is for none.
    pub(super) fn sequence_at(&self, subscriber: usize, sequence: u32) -> Option<(usize, u32)> {
        let channel = self.channel_of(sequence) as u32;
        let nth = self.channels_of(subscriber).binary_search(&channel).ok()?;
        Some((subscriber * self.attached + nth, sequence / self.channels as u32))
    }

    /// Gives the number of the first `published` messages that are for a subscription.
    pub(super) fn expected(&self, subscription: usize, published: u32) -> u32 {
        if subscription / self.attached >= self.reading {
            return 0;
        }
        let (rounds, begun) = (published / self.channels as u32, published % self.channels as u32);
        rounds + u32::from(self.subscribed[subscription] < begun)
    }

    /// Gives the number of deliveries for the first `published` messages.
    pub(super) fn expected_in_all(&self, published: u32) -> u64 {
        (0..self.subscriptions()).map(|subscription| u64::from(self.expected(subscription, published))).sum()
    }
}

/// Pseudorandom numbers, the same in each run (SplitMix64).
struct Chance(u64);

impl Chance {
    fn shuffle(&mut self, cards: &mut [u32]) {
        for last in (1..cards.len()).rev() {
            cards.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn layout() -> Layout {
        Layout::by_chance(500, 125, 20, 500)
    }

    #[test]
    fn layout_gives_equal_fan_out_and_equal_channels_per_subscriber() {
        for (subscribers, channels, attached) in [(500, 125, 20), (100, 25, 20), (50, 25, 4), (7, 3, 3)] {
            for deal in [Layout::by_chance, Layout::in_groups] {
                let layout = deal(subscribers, channels, attached, subscribers);
                let mut fan_out = vec![0; channels];
                for subscriber in 0..subscribers {
                    let own = layout.channels_of(subscriber);
                    assert!(own.is_sorted());
                    assert_eq!(own.iter().collect::<HashSet<_>>().len(), attached, "{own:?}");
                    own.iter().for_each(|channel| fan_out[*channel as usize] += 1);
                }
                assert_eq!(fan_out, vec![subscribers * attached / channels; channels]);
            }
        }
    }

    /// Case: of the 25 groups of 20 subscribers, four are attached to each channel.
    #[test]
    fn grouped_subscribers_share_channels_and_most_of_next_messages() {
        let layout = Layout::in_groups(500, 125, 20, 500);
        let groups: HashSet<&[u32]> = (0..500).map(|subscriber| layout.channels_of(subscriber)).collect();
        assert_eq!(groups.len(), 25);
        let listeners = |sequence| -> HashSet<usize> {
            (0..500).filter(|subscriber| layout.sequence_at(*subscriber, sequence).is_some()).collect()
        };
        let each: usize =
            (0..125).map(|at| (at..at + 5).flat_map(listeners).collect::<HashSet<_>>().len()).sum();
        let together = 400.0 * 125.0 / each as f64;
        assert!((3.9..4.3).contains(&together), "{together} deliveries of five messages to each");
    }

    /// Case: five messages in a row are 400 deliveries, to 500 × (1 − (1 − 0.16)⁵) = 291 subscribers.
    #[test]
    fn messages_that_follow_one_another_share_what_chance_gives() {
        let layout = layout();
        let listeners = |sequence| -> HashSet<usize> {
            (0..500).filter(|subscriber| layout.sequence_at(*subscriber, sequence).is_some()).collect()
        };
        let shared: Vec<usize> =
            (0..125).map(|at| listeners(at).intersection(&listeners(at + 1)).count()).collect();
        let mean = shared.iter().sum::<usize>() as f64 / 125.0;
        assert!((11.0..14.0).contains(&mean), "80 × 19 ÷ 124 is 12.3, not {mean}");
        assert!(shared.iter().all(|shared| (2..=28).contains(shared)), "{shared:?}");
        let each: usize =
            (0..125).map(|at| (at..at + 5).flat_map(listeners).collect::<HashSet<_>>().len()).sum();
        let together = 400.0 * 125.0 / each as f64;
        assert!((1.33..1.42).contains(&together), "{together} deliveries of a window to each");
    }

    #[test]
    fn subscribers_are_spread_alike_in_each_run() {
        assert_eq!(layout().subscribed, layout().subscribed);
    }

    #[test]
    fn message_is_expected_at_subscribers_attached_to_its_channel() {
        let layout = layout();
        for (subscriber, sequence) in
            (0..500).flat_map(|subscriber| [(subscriber, 3 * 125 + 119), (subscriber, 0)])
        {
            let channel = layout.channel_of(sequence) as u32;
            let nth = layout.channels_of(subscriber).iter().position(|attached| *attached == channel);
            let place = nth.map(|nth| (subscriber * 20 + nth, sequence / 125));
            assert_eq!(layout.sequence_at(subscriber, sequence), place, "{subscriber} {sequence}");
        }
    }

    #[test]
    fn non_reading_subscribers_expect_no_deliveries() {
        let layout = Layout::by_chance(500, 125, 20, 499);
        assert_eq!((layout.expected(499 * 20 - 1, 250), layout.expected(499 * 20, 250)), (2, 0));
        assert_eq!(layout.expected_in_all(250), 499 * 20 * 2);
    }

    #[test]
    fn expected_deliveries_equal_messages_with_a_place() {
        let layout = layout();
        for published in [0, 1, 20, 124, 125, 126, 333] {
            let mut placed = vec![0; layout.subscriptions()];
            let places = (0..published).flat_map(|at| (0..500).map(move |to| (to, at)));
            let places = places.filter_map(|(to, at)| layout.sequence_at(to, at));
            places.for_each(|(subscription, _)| placed[subscription] += 1);
            let expected: Vec<u32> = (0..placed.len()).map(|at| layout.expected(at, published)).collect();
            assert_eq!(placed, expected);
            assert_eq!(
                layout.expected_in_all(published),
                placed.iter().map(|count| u64::from(*count)).sum::<u64>()
            );
        }
    }
}
