use std::ops::AddAssign;

/// How many connections are attached to a channel, on one node or on several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttachedCount {
    pub connections: u64,
    /// Those whose credential may publish there.
    pub publishers: u64,
    /// Those that messages are delivered to.
    pub subscribers: u64,
    /// Integrations were told that the channel is occupied, as far as one of the nodes knows.
    pub is_told: bool,
}

impl AddAssign for AttachedCount {
    fn add_assign(&mut self, other: Self) {
        self.connections += other.connections;
        self.publishers += other.publishers;
        self.subscribers += other.subscribers;
        self.is_told |= other.is_told;
    }
}
