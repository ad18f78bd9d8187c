//! The outbox of a running node, asked over its operators' listener.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, HOST};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::super::failure::Failure;
use super::super::target::reachable;
use crate::app::AdminToken;
use crate::config::{Config, node_file};

const CONNECT: Duration = Duration::from_secs(5);

/// The operators' listener of a node.
pub(super) struct RunningNode {
    address: SocketAddr,
    token: AdminToken,
}

impl RunningNode {
    /// The node that runs in the data folder; none: none does.
    pub(super) async fn find(config: &Config) -> Result<Option<Self>, Failure> {
        let Some(address) = admin_address(&node_file(&config.data_dir)) else { return Ok(None) };
        if !matches!(timeout(CONNECT, TcpStream::connect(address)).await, Ok(Ok(_))) {
            return Ok(None);
        }
        let token = match &config.admin_token_file {
            Some(file) => AdminToken::read(file).map(Some),
            None => AdminToken::kept_in(&config.data_dir),
        };
        let token = token.map_err(|error| Failure::because("cannot ask the running node", &error))?;
        let missing = || {
            Failure::failed(
                "the data folder of the running node has no admin-token: name it by --admin-token-file",
            )
        };
        Ok(Some(Self { address, token: token.ok_or_else(missing)? }))
    }

    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: String,
    ) -> Result<T, Failure> {
        let address = self.address;
        let unanswered = |error: &dyn std::error::Error| {
            Failure::because(&format!("the node at {address} did not answer"), error)
        };
        let stream = TcpStream::connect(address).await.map_err(|error| unanswered(&error))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| unanswered(&error))?;
        let request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, address.to_string())
            .header(AUTHORIZATION, self.token.authorization())
            .body(Full::<Bytes>::from(body))
            .map_err(|error| unanswered(&error))?;
        // Owns the sender: the connection ends with it.
        let answered = async move {
            let answer = sender.send_request(request).await?;
            let status = answer.status();
            Ok::<_, hyper::Error>((status, answer.into_body().collect().await?.to_bytes()))
        };
        let (answered, _) = tokio::join!(answered, connection);
        let (status, body) = answered.map_err(|error| unanswered(&error))?;
        if !status.is_success() {
            #[derive(Deserialize)]
            struct Refusal {
                error: String,
            }
            let reason = serde_json::from_slice(&body).map(|Refusal { error }| error);
            let reason = reason.unwrap_or_else(|_| "it is no Fanfare node".to_owned());
            return Err(Failure::failed(format!(
                "the node at {address} answered {}: {reason}",
                status.as_u16()
            )));
        }
        serde_json::from_slice(&body).map_err(|error| unanswered(&error))
    }
}

fn admin_address(file: &Path) -> Option<SocketAddr> {
    #[derive(Deserialize)]
    struct Node {
        admin: SocketAddr,
    }
    let text = std::fs::read_to_string(file).ok()?;
    serde_json::from_str(&text).ok().map(|Node { admin }| reachable(admin))
}
