//! What is said of the connections of clients.

use fanfare_proto::peer::v1;

use super::{CONNECTIONS_MAX, Malformed, Peer, Tenants, is_id};
use crate::model::{AttachedCount, ConnectionId, Place, TakenUp, Tenure};

pub(super) fn taken_up(taken: v1::TakenUp, from: &Peer) -> Result<TakenUp, Malformed> {
    let place = place(taken.place)?;
    if place.incarnation != from.incarnation {
        return Err(Malformed("a connection of another node"));
    }
    let tenure = Tenure { connection_id: connection_id(&taken.connection_id)?, epoch: taken.epoch, place };
    Ok(TakenUp { tenure, former: self::place(taken.former)? })
}

fn place(place: Option<v1::Place>) -> Result<Place, Malformed> {
    let v1::Place { incarnation, shard, slot, generation } = place.ok_or(Malformed("no place"))?;
    let shard = u16::try_from(shard).map_err(|_| Malformed("no such place"))?;
    Ok(Place { incarnation, shard, slot, generation })
}

pub(super) fn connection_id(bytes: &[u8]) -> Result<ConnectionId, Malformed> {
    let bytes = bytes.try_into().map_err(|_| Malformed("a connection id of another length"))?;
    Ok(ConnectionId::from_bytes(bytes))
}

pub(super) fn tenant_connections(connections: v1::TenantConnections) -> Result<Tenants, Malformed> {
    let v1::TenantConnections { counts, begins, ends } = connections;
    let count = |v1::tenant_connections::Count { tenant, connections }| {
        is_id(&tenant).then(|| (tenant.into(), connections.min(CONNECTIONS_MAX)))
    };
    let counts = counts.into_iter().map(count).collect::<Option<_>>();
    Ok(Tenants::Connections { counts: counts.ok_or(Malformed("a bad tenant"))?, begins, ends })
}

pub(super) fn attached_count(count: v1::AttachedCount) -> AttachedCount {
    let [connections, publishers, subscribers] =
        [count.connections, count.publishers, count.subscribers].map(|count| count.min(CONNECTIONS_MAX));
    AttachedCount { connections, publishers, subscribers, is_told: count.told }
}

pub(in crate::cluster) fn write_attached(counts: &[AttachedCount]) -> v1::answer::Kind {
    let written = counts.iter().map(|count| {
        let AttachedCount { connections, publishers, subscribers, is_told: told } = *count;
        v1::AttachedCount { connections, publishers, subscribers, told }
    });
    v1::answer::Kind::AttachedCounts(v1::AttachedCounts { counts: written.collect() })
}
