//! A harness that runs the real `fanfare` binary, with clients and faults for tests.
//!
//! Every wait is for a state, with a deadline, or has a name in [`waits`]. Every port is 0, and every node has a data
//! folder of its own.

pub mod attempts;
pub mod auth_server;
pub mod balancer;
mod binary;
pub mod cassandra;
pub mod chaos;
pub mod clock;
pub mod cluster;
pub mod collector;
pub mod command;
pub mod control_plane;
pub mod directory;
pub mod disk;
pub mod exposition;
pub mod forge;
pub mod history;
pub mod hostile;
pub mod http;
pub mod kubernetes;
pub mod moto;
pub mod network;
pub mod node;
pub mod presence;
pub mod proxy;
pub mod python;
pub mod rabbitmq;
pub mod raw;
pub mod receiver;
pub mod ring;
pub mod roaming;
mod script;
pub mod socket;
mod system;
pub mod tls;
pub mod traffic;
pub mod wait;
pub mod waits;

pub use auth_server::AuthServer;
pub use balancer::Balancer;
pub use cassandra::Cassandra;
pub use command::RunningCommand;
pub use directory::Directory;
pub use disk::Disk;
pub use http::Response;
pub use kubernetes::Kubernetes;
pub use moto::Moto;
pub use network::Network;
pub use node::{Node, NodeOptions};
pub use proxy::Proxy;
pub use python::python;
pub use rabbitmq::RabbitMq;
pub use raw::Raw;
pub use socket::Socket;
pub use system::not_run;
pub use tls::Tls;
pub use wait::{wait_for, wait_until};

/// Timeout for anything that should happen at once, on a machine that is busy with other tests.
pub const SOON: std::time::Duration = std::time::Duration::from_secs(20);
