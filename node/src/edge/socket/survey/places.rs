//! Where a channel stands in the listings.

use std::hash::{BuildHasher as _, RandomState};

use crate::model::ChannelName;

/// An order of channels that stays while the node runs, and in which a place tells nothing of the channel's name.
#[derive(Debug, Clone, Default)]
pub struct ChannelOrder([RandomState; 2]);

/// So wide that no two channels share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChannelPlace(pub u128);

impl ChannelOrder {
    pub fn place(&self, channel: &ChannelName) -> ChannelPlace {
        let [high, low] = self.0.each_ref().map(|hasher| hasher.hash_one(channel));
        ChannelPlace(u128::from(high) << 64 | u128::from(low))
    }
}
