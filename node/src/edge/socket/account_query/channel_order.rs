//! Order of channels in the listings.

use std::hash::{BuildHasher as _, RandomState};

use crate::model::ChannelName;

/// Keyed hash that orders channels. The order stays while the node runs, and a sort key reveals nothing of the channel's name.
#[derive(Debug, Clone, Default)]
pub struct ChannelOrder([RandomState; 2]);

/// Sort key of a channel, so wide that no two channels share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChannelSortKey(pub u128);

impl ChannelOrder {
    pub fn sort_key(&self, channel: &ChannelName) -> ChannelSortKey {
        let [high, low] = self.0.each_ref().map(|hasher| hasher.hash_one(channel));
        ChannelSortKey(u128::from(high) << 64 | u128::from(low))
    }
}
