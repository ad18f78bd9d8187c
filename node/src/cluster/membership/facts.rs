//! Facts that each node gossips of itself, and the view that other nodes have of it.

use std::net::SocketAddr;
use std::sync::Arc;

use super::liveness::LivenessState;

/// Gossiped facts of a node. Must change rarely: each change goes to every node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Peer address, `host:port`; none until the listener is bound.
    pub peer: Option<String>,
    /// Client address.
    pub listen: String,
    pub version: String,
    /// Minor version of the protocol between nodes.
    pub protocol_minor: u32,
    pub ready: bool,
    pub draining: bool,
    /// True once other nodes have linked to this incarnation.
    pub met: bool,
    /// True once the node has finished its drain. Nodes without a link to it know from this that it did not fail.
    pub left: bool,
}

/// Longest text that is accepted from gossip; a longer one counts as missing.
const TEXT_BYTES_MAX: usize = 256;
const INCARNATION: &str = "incarnation";
const MET: &str = "met";
const LEFT: &str = "left";

impl Facts {
    /// Gossip entries of the facts. A node ignores keys that it does not know.
    pub(super) fn entries(&self, incarnation: u64) -> [(&'static str, String); 9] {
        [
            (INCARNATION, format!("{incarnation:016x}")),
            ("peer", self.peer.clone().unwrap_or_default()),
            ("listen", self.listen.clone()),
            ("version", self.version.clone()),
            ("protocol", self.protocol_minor.to_string()),
            ("ready", self.ready.to_string()),
            ("draining", self.draining.to_string()),
            (MET, self.met.to_string()),
            (LEFT, self.left.to_string()),
        ]
    }

    /// Reads gossip entries. None until all required entries have arrived.
    pub(super) fn read<'a>(get: impl Fn(&str) -> Option<&'a str>) -> Option<(u64, Self)> {
        let text = |key| get(key).filter(|text| text.len() <= TEXT_BYTES_MAX).map(str::to_owned);
        let incarnation = u64::from_str_radix(get(INCARNATION)?, 16).ok()?;
        let facts = Self {
            peer: text("peer").filter(|peer| !peer.is_empty()),
            listen: text("listen")?,
            version: text("version")?,
            protocol_minor: get("protocol")?.parse().ok()?,
            ready: get("ready")? == "true",
            draining: get("draining")? == "true",
            met: get(MET) == Some("true"),
            left: get(LEFT) == Some("true"),
        };
        Some((incarnation, facts))
    }
}

/// Another node, by the incarnation of it that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterMember {
    pub node_id: Arc<str>,
    /// Unique id of this incarnation, in all of the cluster.
    pub incarnation: u64,
    /// Rises with every incarnation of the node unless its clock goes back.
    pub generation: u64,
    pub gossip: SocketAddr,
    pub facts: Facts,
    pub state: LivenessState,
    /// True if the node is down for this node, and other nodes still hear it.
    pub is_seen_by_others: bool,
}

impl ClusterMember {
    /// True if the node has left cleanly, even if its goodbye did not arrive here.
    pub fn has_left(&self) -> bool {
        self.facts.left && self.state != LivenessState::Alive
    }

    /// Incarnation and generation.
    pub(super) fn incarnation_key(&self) -> (u64, u64) {
        (self.incarnation, self.generation)
    }
}

/// All other known nodes, by node id. Nodes that are down are removed after 15 minutes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterMembers(pub Vec<ClusterMember>);

impl ClusterMembers {
    pub fn get(&self, node_id: &str) -> Option<&ClusterMember> {
        self.0.iter().find(|member| *member.node_id == *node_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            peer: Some("a.example:1".to_owned()),
            listen: "a.example:2".to_owned(),
            version: "0.1.0".to_owned(),
            protocol_minor: 3,
            ready: true,
            met: true,
            ..Facts::default()
        }
    }

    #[test]
    fn gossiped_facts_are_read_back() {
        for facts in
            [facts(), Facts { peer: None, ready: false, draining: true, met: false, left: true, ..facts() }]
        {
            let entries = facts.entries(7);
            let get =
                |key: &str| entries.iter().find(|(name, _)| *name == key).map(|(_, text)| text.as_str());
            assert_eq!(Facts::read(get), Some((7, facts.clone())));
            for (missing, _) in entries.iter().filter(|(key, _)| !["peer", MET, LEFT].contains(key)) {
                assert_eq!(Facts::read(|key| get(key).filter(|_| key != *missing)), None, "{missing}");
            }
        }
    }

    #[test]
    fn facts_with_text_too_long_are_not_read() {
        let entries = Facts { version: "v".repeat(TEXT_BYTES_MAX + 1), ..facts() }.entries(7);
        let get = |key: &str| entries.iter().find(|(name, _)| *name == key).map(|(_, text)| text.as_str());
        assert_eq!(Facts::read(get), None);
    }
}
