//! Peer messages about client sessions and connection counts: reads and writes their wire form.

use fanfare_proto::peer::v1;

use super::{CONNECTIONS_MAX, MalformedItem, Peer, TenantCountMessage, is_id};
use crate::model::{AttachedCount, ConnectionId, SessionLocation, SessionOwnership, SessionTakeover};

pub(super) fn takeover(taken: v1::SessionTakeover, from: &Peer) -> Result<SessionTakeover, MalformedItem> {
    let location = session_location(taken.location)?;
    if location.incarnation != from.incarnation {
        return Err(MalformedItem("a connection of another node"));
    }
    let ownership = SessionOwnership {
        connection_id: connection_id(&taken.connection_id)?,
        epoch: taken.epoch,
        location,
    };
    Ok(SessionTakeover { ownership, previous: self::session_location(taken.previous)? })
}

fn session_location(location: Option<v1::SessionLocation>) -> Result<SessionLocation, MalformedItem> {
    let v1::SessionLocation { incarnation, shard, slot, generation } =
        location.ok_or(MalformedItem("no place"))?;
    let shard = u16::try_from(shard).map_err(|_| MalformedItem("no such place"))?;
    Ok(SessionLocation { incarnation, shard, slot, generation })
}

pub(super) fn connection_id(bytes: &[u8]) -> Result<ConnectionId, MalformedItem> {
    let bytes = bytes.try_into().map_err(|_| MalformedItem("a connection id of another length"))?;
    Ok(ConnectionId::from_bytes(bytes))
}

pub(super) fn tenant_connections(
    connections: v1::TenantConnections,
) -> Result<TenantCountMessage, MalformedItem> {
    let v1::TenantConnections { counts, begins, ends } = connections;
    let count = |v1::tenant_connections::Count { tenant, connections }| {
        is_id(&tenant).then(|| (tenant.into(), connections.min(CONNECTIONS_MAX)))
    };
    let counts = counts.into_iter().map(count).collect::<Option<_>>();
    Ok(TenantCountMessage::Connections { counts: counts.ok_or(MalformedItem("a bad tenant"))?, begins, ends })
}

pub(super) fn attached_count(count: v1::AttachedCount) -> AttachedCount {
    let [connections, publishers, subscribers] =
        [count.connections, count.publishers, count.subscribers].map(|count| count.min(CONNECTIONS_MAX));
    AttachedCount { connections, publishers, subscribers, is_announced: count.announced }
}

pub(in crate::cluster) fn write_attached(counts: &[AttachedCount]) -> v1::answer::Kind {
    let written = counts.iter().map(|count| {
        let AttachedCount { connections, publishers, subscribers, is_announced } = *count;
        v1::AttachedCount { connections, publishers, subscribers, announced: is_announced }
    });
    v1::answer::Kind::AttachedCounts(v1::AttachedCounts { counts: written.collect() })
}
