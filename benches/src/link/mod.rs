//! A link between nodes alone: both ends are processes of their own, with the peer streams, TLS and gRPC of a node.

mod origin;
pub mod sink;
pub mod source;

use std::path::PathBuf;

use clap::Args;
use fanfare::cluster::ClusterKey;
use fanfare::cluster::link::PeerTls;

use crate::Result;

pub use origin::Publishing;

#[derive(Args)]
pub struct End {
    /// The secret of the cluster, the same at both ends.
    #[arg(long)]
    pub cluster_key_file: PathBuf,
}

impl End {
    fn tls(&self) -> Result<PeerTls> {
        Ok(PeerTls::from_key(&ClusterKey::open(&self.cluster_key_file)?)?)
    }
}
