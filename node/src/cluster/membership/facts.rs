//! What each node says of itself, and the view that others have of it.

use std::net::SocketAddr;
use std::sync::Arc;

use super::liveness::State;

/// What a node says of itself. Nothing here may change often: each change goes to every node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Where other nodes connect, `host:port`; none until it is bound.
    pub peer: Option<String>,
    /// Where clients connect.
    pub listen: String,
    pub version: String,
    /// Of the protocol between nodes.
    pub protocol_minor: u32,
    pub ready: bool,
    pub draining: bool,
    /// Others have linked to it in this run.
    pub met: bool,
    /// It has done all that it had to do. Who has no link to it knows from this that it has not died.
    pub left: bool,
}

/// Texts that others gossip are cut off here.
const TEXT_BYTES_MAX: usize = 256;
const INCARNATION: &str = "incarnation";
const MET: &str = "met";
const LEFT: &str = "left";

impl Facts {
    /// As they are gossiped. Keys that a node does not know it lets be.
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

    /// None while not all that is needed has arrived.
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

/// Another node, in the run of it that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub node_id: Arc<str>,
    /// Of this run, and of no other run of any node.
    pub incarnation: u64,
    /// Rises with every run of the node whose clock does not go back.
    pub generation: u64,
    pub gossip: SocketAddr,
    pub facts: Facts,
    pub state: State,
    /// It is dead for this node, and others hear it.
    pub is_elsewhere: bool,
}

impl Member {
    /// In good order, also where its goodbye did not come here.
    pub fn has_left(&self) -> bool {
        self.facts.left && self.state != State::Alive
    }

    /// Incarnation and generation.
    pub(super) fn run(&self) -> (u64, u64) {
        (self.incarnation, self.generation)
    }
}

/// Every other node that is known, by node id. The dead are gone after 15 minutes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members(pub Vec<Member>);

impl Members {
    pub fn get(&self, node_id: &str) -> Option<&Member> {
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
