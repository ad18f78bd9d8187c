//! Client of a running node's admin listener.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, HOST};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::failure::Failure;
use super::target::reachable;
use crate::app::AdminToken;
use crate::config::{Config, node_file};

const CONNECT: Duration = Duration::from_secs(5);

/// The admin listener of a node.
pub(super) struct RunningNode {
    address: SocketAddr,
    token: AdminToken,
}

impl RunningNode {
    /// The node that runs in the data folder; none if no node runs.
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

    /// Sends a request and parses the JSON answer.
    pub(super) async fn ask<T: DeserializeOwned>(
        &self,
        method: &str,
        path: &str,
        body: String,
    ) -> Result<T, Failure> {
        let body =
            self.answered(method, path, body, async |body| Ok(body.collect().await?.to_bytes())).await?;
        serde_json::from_slice(&body).map_err(|error| self.unanswered(&error))
    }

    /// Streams the bytes of the answer to `take`, until the answer ends or the receiver has gone.
    pub(super) async fn stream(&self, path: &str, take: mpsc::Sender<Bytes>) -> Result<(), Failure> {
        let handed_on = async |mut body: Incoming| {
            while let Some(frame) = body.frame().await {
                let Ok(bytes) = frame?.into_data() else { continue };
                if take.send(bytes).await.is_err() {
                    break;
                }
            }
            Ok(())
        };
        self.answered("GET", path, String::new(), handed_on).await
    }

    /// Sends a request and returns the result of `take` on the answer's body.
    async fn answered<T>(
        &self,
        method: &str,
        path: &str,
        body: String,
        take: impl AsyncFnOnce(Incoming) -> hyper::Result<T>,
    ) -> Result<T, Failure> {
        let address = self.address;
        let stream = TcpStream::connect(address).await.map_err(|error| self.unanswered(&error))?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.unanswered(&error))?;
        let request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, address.to_string())
            .header(AUTHORIZATION, self.token.authorization())
            .body(Full::<Bytes>::from(body))
            .map_err(|error| self.unanswered(&error))?;
        // The future owns the sender, so the connection ends with it.
        let answered = async move {
            let answer = sender.send_request(request).await?;
            let (status, body) = (answer.status(), answer.into_body());
            if status.is_success() {
                return Ok(Ok(take(body).await?));
            }
            Ok::<_, hyper::Error>(Err((status, body.collect().await?.to_bytes())))
        };
        let (answered, _) = tokio::join!(answered, connection);
        answered.map_err(|error| self.unanswered(&error))?.map_err(|(status, body)| {
            #[derive(Deserialize)]
            struct RefusalBody {
                error: String,
            }
            let reason = serde_json::from_slice(&body).map(|RefusalBody { error }| error);
            let reason = reason.unwrap_or_else(|_| "it is no Fanfare node".to_owned());
            Failure::failed(format!("the node at {address} answered {}: {reason}", status.as_u16()))
        })
    }

    fn unanswered(&self, error: &dyn std::error::Error) -> Failure {
        Failure::because(&format!("the node at {} did not answer", self.address), error)
    }
}

fn admin_address(file: &Path) -> Option<SocketAddr> {
    #[derive(Deserialize)]
    struct AdminNodeFile {
        admin: SocketAddr,
    }
    let text = std::fs::read_to_string(file).ok()?;
    serde_json::from_str(&text).ok().map(|AdminNodeFile { admin }| reachable(admin))
}
