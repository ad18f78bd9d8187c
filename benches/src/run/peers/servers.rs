//! Start and configuration of the peers.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use super::super::server::Server;
use crate::Result;
use crate::wire::pusher::{KEY, SECRET};

/// Starts the server of `benches/peers/centrifuge`.
pub(super) fn centrifuge(binary: &Path, batching: bool) -> Result<Server> {
    let mut command = Command::new(binary);
    command.env("GOGC", "200").args(batching.then_some("-batching"));
    Server::announcing(&mut command)
}

/// Starts a NATS server with a WebSocket listener, and a folder of its own under `data`.
pub(super) fn nats(binary: &Path, data: &Path) -> Result<Server> {
    let folder = tempfile::Builder::new().prefix("nats-").tempdir_in(data)?;
    let configuration = folder.path().join("nats.conf");
    let ports = folder.path().display().to_string();
    fs::write(
        &configuration,
        format!(
            "host: \"127.0.0.1\"\nport: -1\nports_file_dir: {ports:?}\n\
             websocket {{ listen: \"127.0.0.1:-1\", no_tls: true, compression: false }}\n"
        ),
    )?;
    let mut command = Command::new(binary);
    command.arg("-c").arg(&configuration);
    Server::writing(&mut command, folder, nats_address)
}

/// Starts a Sockudo server with one application, and a folder of its own under `data`.
pub(super) fn sockudo(binary: &Path, data: &Path) -> Result<Server> {
    let folder = tempfile::Builder::new().prefix("sockudo-").tempdir_in(data)?;
    // The server does not report its port, so it gets one that was free a moment ago.
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let configuration = folder.path().join("sockudo.toml");
    fs::write(
        &configuration,
        format!(
            "host = \"{}\"\nport = {}\n\
             [app_manager]\ndriver = \"memory\"\n\
             [[app_manager.array.apps]]\nid = \"bench\"\nkey = \"{KEY}\"\nsecret = \"{SECRET}\"\nenabled = true\n\
             [app_manager.array.apps.policy.limits]\nmax_connections = 100000\nmax_client_events_per_second = 0\n\
             [app_manager.array.apps.policy.features]\nenable_client_messages = true\n\
             [rate_limiter]\nenabled = false\n\
             [metrics]\nenabled = false\n",
            address.ip(),
            address.port(),
        ),
    )?;
    let mut command = Command::new(binary);
    command.arg("--config").arg(&configuration).current_dir(folder.path());
    Server::writing(&mut command, folder, |_| Ok(TcpStream::connect(address).ok().map(|_| address)))
}

/// Reads the address that the server writes into a file with its process id; `None` while the file is missing or
/// incomplete.
fn nats_address(folder: &Path) -> Result<Option<SocketAddr>> {
    #[derive(Deserialize)]
    struct NatsPorts {
        websocket: Vec<String>,
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "ports")
            && let Ok(written) = serde_json::from_str::<NatsPorts>(&fs::read_to_string(path)?)
        {
            let url = written.websocket.first().ok_or("the server has no WebSocket listener")?;
            return Ok(Some(url.trim_start_matches("ws://").parse()?));
        }
    }
    Ok(None)
}
