//! How the peers are started and set.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use serde::Deserialize;

use super::super::server::Server;
use crate::Result;

/// The server of `benches/peers/centrifuge`.
pub(super) fn centrifuge(binary: &Path, batching: bool) -> Result<Server> {
    let mut command = Command::new(binary);
    command.env("GOGC", "200").args(batching.then_some("-batching"));
    Server::announcing(&mut command)
}

/// A NATS server with a WebSocket listener, and a folder of its own under `data`.
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

/// None while the file is not there or not whole: the server writes it in place, under a name with its process id.
fn nats_address(folder: &Path) -> Result<Option<SocketAddr>> {
    #[derive(Deserialize)]
    struct Written {
        websocket: Vec<String>,
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "ports")
            && let Ok(written) = serde_json::from_str::<Written>(&fs::read_to_string(path)?)
        {
            let url = written.websocket.first().ok_or("the server has no WebSocket listener")?;
            return Ok(Some(url.trim_start_matches("ws://").parse()?));
        }
    }
    Ok(None)
}
