//! What the recent messages of all channels may take: the old go, and where memory is scarce those of the channels that were
//! attached to least recently.

use std::sync::Arc;

use super::channels::{Channel, Hub};

/// Messages that go under one lock of their channel, so that nobody waits long for it.
const AT_ONCE: usize = 256;

impl Hub {
    /// Forgets what is older than it is kept, and where rings are many the channels that were attached to least recently. Takes
    /// milliseconds where there are many channels; to be called a few times within a resume window.
    pub fn sweep(&self) {
        let now_ms = self.now_ms();
        let channels = self.all();
        for channel in &channels {
            let mut state = channel.state.lock();
            let keep_ms = self.rings.keep_ms;
            if let Some(ring) = &mut state.ring {
                ring.drop_old(now_ms);
                if ring.idle_ms.is_some_and(|since_ms| since_ms + keep_ms < now_ms) {
                    state.ring = None;
                    self.remove_if_unused(channel, &mut state);
                }
            }
        }
        if self.rings.are_many() {
            self.forget(channels);
        }
    }

    /// To be called without the lock of a channel where the rings may have grown. Costs a look at one number unless they are
    /// over their bound.
    pub(super) fn give_way(&self) {
        if self.rings.is_over() {
            self.make_room(self.rings.below());
        }
    }

    /// Drops messages, the oldest of the channel that was attached to least recently first.
    fn make_room(&self, bytes_max: usize) {
        while self.rings.held() > bytes_max
            && let Some((number, channel)) = self.rings.first()
        {
            let mut state = channel.state.lock();
            let attached = state.attached;
            // It may have gone since it was taken out of the order.
            let Some(ring) = state.ring.as_mut().filter(|ring| ring.is_listed(number)) else { continue };
            let over = self.rings.held().saturating_sub(bytes_max);
            let dropped = if attached == number { ring.give_way(over, AT_ONCE) } else { Vec::new() };
            ring.list(&channel, attached);
            drop(state);
            drop(dropped);
        }
    }

    /// A channel that is forgotten takes up its numbers elsewhere, and then the store cannot tell that nothing is missing:
    /// all messages go before the first channel does.
    fn forget(&self, channels: Vec<Arc<Channel>>) {
        self.make_room(self.rings.enough());
        let idle = |channel: Arc<Channel>| {
            let state = channel.state.lock();
            let attached = (state.targets == 0 && state.ring.is_some()).then_some(state.attached);
            drop(state);
            Some((attached?, channel))
        };
        let mut idle: Vec<(u64, Arc<Channel>)> = channels.into_iter().filter_map(idle).collect();
        idle.sort_unstable_by_key(|(attached, _)| *attached);
        for (_, channel) in idle {
            if self.rings.held() <= self.rings.enough() {
                return;
            }
            let mut state = channel.state.lock();
            if state.targets == 0 {
                state.ring = None;
                self.remove_if_unused(&channel, &mut state);
            }
        }
    }
}
