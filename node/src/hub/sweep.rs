//! Eviction: old messages are dropped, and while memory is scarce those of the channels that were attached to least recently.

use std::sync::Arc;

use super::channels::{Channel, Hub};

/// Messages dropped under one lock of their channel, so that the lock is not held for long.
const AT_ONCE: usize = 256;

impl Hub {
    /// Drops messages beyond their retention and, when there are too many replay buffers, the channels that were attached to least
    /// recently. Takes milliseconds with many channels; to be called a few times within a resume window.
    pub fn sweep(&self) {
        let now_ms = self.now_ms();
        let channels = self.all();
        for channel in &channels {
            let mut state = channel.state.lock();
            let keep_ms = self.replay_budget.keep_ms;
            if let Some(replay_buffer) = &mut state.replay_buffer {
                replay_buffer.drop_old(now_ms);
                if replay_buffer.idle_ms.is_some_and(|since_ms| since_ms + keep_ms < now_ms) {
                    state.replay_buffer = None;
                    self.remove_if_unused(channel, &mut state);
                }
            }
        }
        if self.replay_budget.has_many_buffers() {
            self.forget(channels);
        }
    }

    /// Evicts messages if the buffers are over their bound; otherwise costs one atomic load. To be called after buffers may have grown,
    /// without the lock of a channel.
    pub(super) fn enforce_budget(&self) {
        if self.replay_budget.is_exceeded() {
            self.evict_to(self.replay_budget.eviction_target());
        }
    }

    /// Drops messages until the bound is met, the oldest of the least recently attached channel first.
    fn evict_to(&self, bytes_max: usize) {
        while self.replay_budget.held() > bytes_max
            && let Some((number, channel)) = self.replay_budget.first()
        {
            let mut state = channel.state.lock();
            let attached = state.attach_number;
            // The buffer may have been dropped since the channel was taken out of the order.
            let Some(replay_buffer) =
                state.replay_buffer.as_mut().filter(|replay_buffer| replay_buffer.is_listed(number))
            else {
                continue;
            };
            let over = self.replay_budget.held().saturating_sub(bytes_max);
            let dropped = if attached == number { replay_buffer.evict(over, AT_ONCE) } else { Vec::new() };
            replay_buffer.list(&channel, attached);
            drop(state);
            drop(dropped);
        }
    }

    /// Forgets idle channels. A forgotten channel resumes its sequences elsewhere, and then the store cannot tell that nothing is missing;
    /// so all messages are dropped before the first channel is.
    fn forget(&self, channels: Vec<Arc<Channel>>) {
        self.evict_to(self.replay_budget.many_buffers_target());
        let idle = |channel: Arc<Channel>| {
            let state = channel.state.lock();
            let attached =
                (state.targets == 0 && state.replay_buffer.is_some()).then_some(state.attach_number);
            drop(state);
            Some((attached?, channel))
        };
        let mut idle: Vec<(u64, Arc<Channel>)> = channels.into_iter().filter_map(idle).collect();
        idle.sort_unstable_by_key(|(attached, _)| *attached);
        for (_, channel) in idle {
            if self.replay_budget.held() <= self.replay_budget.many_buffers_target() {
                return;
            }
            let mut state = channel.state.lock();
            if state.targets == 0 {
                state.replay_buffer = None;
                self.remove_if_unused(&channel, &mut state);
            }
        }
    }
}
