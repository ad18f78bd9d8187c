//! The part of a node that knows of other nodes.

use std::net::{SocketAddr, ToSocketAddrs as _, UdpSocket};
use std::sync::Arc;

use super::StartError;
use crate::cluster::ClusterKey;
use crate::cluster::membership::{Facts, Membership, Options};
use crate::config::Config;
use crate::model::Clock;
use crate::tasks::Tasks;

/// Of the protocol between nodes.
const PROTOCOL_MINOR: u32 = 0;

/// What a node of a cluster has before it starts to speak.
pub(super) struct Gossip {
    key: ClusterKey,
    socket: UdpSocket,
    address: SocketAddr,
}

/// None for a node that is alone.
pub(super) fn bind(config: &Config) -> Result<Option<Gossip>, StartError> {
    let (Some(address), Some(key)) = (config.gossip_listen, &config.cluster_key_file) else {
        return Ok(None);
    };
    let key =
        ClusterKey::open(key).map_err(StartError::at("cannot use the cluster key (--cluster-key-file)"))?;
    let at = || format!("cannot listen on {address} (--gossip-listen)");
    let socket = UdpSocket::bind(address).map_err(StartError::at(at()))?;
    let address = socket.local_addr().map_err(StartError::at(at()))?;
    Ok(Some(Gossip { key, socket, address }))
}

impl Gossip {
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Joins the others, as a node that is ready.
pub(super) fn join(
    gossip: Option<Gossip>,
    config: &Config,
    node_id: &Arc<str>,
    incarnation: u64,
    listen: SocketAddr,
    tasks: &Tasks,
) -> Result<Option<Membership>, StartError> {
    let Some(Gossip { key, socket, address }) = gossip else { return Ok(None) };
    let options = Options {
        node_id: Arc::clone(node_id),
        incarnation,
        socket,
        advertise: advertised(config, address)?,
        seeds: config.seeds.clone(),
        key,
        facts: Facts {
            peer: None,
            listen: under(config, listen),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_minor: PROTOCOL_MINOR,
            ready: true,
            draining: false,
        },
        clock: Clock::system(),
    };
    Membership::start(options, tasks).map(Some).map_err(StartError::at("cannot start gossip"))
}

/// As others reach what is bound to `address`.
fn under(config: &Config, address: SocketAddr) -> String {
    match &config.advertise {
        Some(host) if host.contains(':') => format!("[{host}]:{}", address.port()),
        Some(host) => format!("{host}:{}", address.port()),
        None => address.to_string(),
    }
}

/// Gossip speaks of addresses, not of names: one of the family that is listened on.
fn advertised(config: &Config, address: SocketAddr) -> Result<SocketAddr, StartError> {
    if config.advertise.is_none() {
        return Ok(address);
    }
    let name = under(config, address);
    let at = || format!("cannot look up {name} (--advertise)");
    let found: Vec<_> = name.to_socket_addrs().map_err(StartError::at(at()))?.collect();
    let same = found.iter().find(|found| found.is_ipv4() == address.is_ipv4());
    same.or(found.first()).copied().ok_or_else(|| StartError::at(at())("it has no address"))
}
