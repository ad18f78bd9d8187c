//! Who listens where, and which message goes where: all of it follows from the message's number.

/// The same number of channels for each subscriber, and nearly the same number of subscribers for each channel.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) subscribers: usize,
    pub(super) channels: usize,
    /// Channels per subscriber.
    pub(super) attached: usize,
    /// The first so many of the subscribers read; nothing is expected of the others.
    pub(super) reading: usize,
}

impl Layout {
    /// Names of one length, so that the messages of all channels are laid out alike.
    pub(super) fn name(channel: usize) -> String {
        format!("bench:fanout:{channel:06}")
    }

    /// The channels of a subscriber, in the order of its subscriptions: the next ones after those of the subscriber before.
    pub(super) fn channels_of(self, subscriber: usize) -> impl Iterator<Item = usize> {
        let first = self.first_of(subscriber);
        (0..self.attached).map(move |nth| (first + nth) % self.channels)
    }

    pub(super) fn subscriptions(self) -> usize {
        self.subscribers * self.attached
    }

    /// The channels take turns.
    pub(super) fn channel_of(self, sequence: u32) -> usize {
        sequence as usize % self.channels
    }

    /// Which subscription of this subscriber a message is for, and its number within the channel; None when for none.
    pub(super) fn place(self, subscriber: usize, sequence: u32) -> Option<(usize, u32)> {
        let after_first = self.channel_of(sequence) + self.channels - self.first_of(subscriber);
        let nth = after_first % self.channels;
        (nth < self.attached).then(|| (subscriber * self.attached + nth, sequence / self.channels as u32))
    }

    /// How many of the first `published` messages are for a subscription.
    pub(super) fn expected(self, subscription: usize, published: u32) -> u32 {
        let (subscriber, nth) = (subscription / self.attached, subscription % self.attached);
        if subscriber >= self.reading {
            return 0;
        }
        let channel = (self.first_of(subscriber) + nth) % self.channels;
        let (rounds, begun) = (published / self.channels as u32, published as usize % self.channels);
        rounds + u32::from(channel < begun)
    }

    /// How many deliveries the first `published` messages are.
    pub(super) fn expected_in_all(self, published: u32) -> u64 {
        (0..self.subscriptions()).map(|subscription| u64::from(self.expected(subscription, published))).sum()
    }

    fn first_of(self, subscriber: usize) -> usize {
        subscriber * self.attached % self.channels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { subscribers: 500, channels: 125, attached: 20, reading: 500 };

    #[test]
    fn each_channel_has_as_many_subscribers() {
        let mut fan_out = [0; 125];
        (0..LAYOUT.subscribers)
            .flat_map(|at| LAYOUT.channels_of(at))
            .for_each(|channel| fan_out[channel] += 1);
        assert_eq!(fan_out, [80; 125]);
    }

    #[test]
    fn a_message_is_for_those_who_are_attached_to_its_channel() {
        for (subscriber, sequence) in
            [(0, 0), (0, 19), (0, 20), (7, 140 + 125), (499, 124), (499, 3 * 125 + 119)]
        {
            let channel = LAYOUT.channel_of(sequence);
            let nth = LAYOUT.channels_of(subscriber).position(|attached| attached == channel);
            let place = nth.map(|nth| (subscriber * 20 + nth, sequence / 125));
            assert_eq!(LAYOUT.place(subscriber, sequence), place, "{subscriber} {sequence}");
        }
    }

    #[test]
    fn nothing_is_expected_of_who_does_not_read() {
        let layout = Layout { reading: 499, ..LAYOUT };
        assert_eq!((layout.expected(499 * 20 - 1, 250), layout.expected(499 * 20, 250)), (2, 0));
        assert_eq!(layout.expected_in_all(250), 499 * 20 * 2);
    }

    #[test]
    fn what_is_expected_is_what_has_a_place() {
        for published in [0, 1, 20, 124, 125, 126, 333] {
            let mut placed = vec![0; LAYOUT.subscriptions()];
            let everyone = || 0..LAYOUT.subscribers;
            let places = (0..published).flat_map(|at| everyone().filter_map(move |to| LAYOUT.place(to, at)));
            places.for_each(|(subscription, _)| placed[subscription] += 1);
            let expected: Vec<u32> = (0..placed.len()).map(|at| LAYOUT.expected(at, published)).collect();
            assert_eq!(placed, expected);
            assert_eq!(
                LAYOUT.expected_in_all(published),
                placed.iter().map(|count| u64::from(*count)).sum::<u64>()
            );
        }
    }
}
