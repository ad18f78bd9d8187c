use std::ops::AddAssign;

/// Number of connections that are attached to a channel, on one node or on several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttachedCount {
    pub connections: u64,
    /// Connections whose credential may publish there.
    pub publishers: u64,
    /// Connections that receive messages.
    pub subscribers: u64,
    /// Whether the integrations were told that the channel is occupied, as far as one of the nodes knows.
    pub is_announced: bool,
}

impl AddAssign for AttachedCount {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.publishers += other.publishers;
        self.subscribers += other.subscribers;
        self.is_announced |= other.is_announced;
    }
}
