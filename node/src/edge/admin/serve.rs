//! Connections of the operators' listener: few, and none that leaves its request head incomplete.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::edge::host;
use crate::telemetry::RATE_LIMITED;

/// Maximum of connections; further ones wait in the backlog.
const CONNECTIONS_MAX: usize = 256;
/// Pause of accepting when the system has no file left.
const PAUSE: Duration = Duration::from_millis(20);

/// Serves operators. Never returns. `header_time` bounds the head of each request, and the silence before it.
pub async fn serve(listener: TcpListener, router: Router, header_time: Duration) {
    let router = router.layer(from_fn(host::checked));
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let permit = match Arc::clone(&permits).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                metrics::counter!("fanfare_admin_connections_full_total").increment(1);
                tracing::warn!(target: RATE_LIMITED, places = CONNECTIONS_MAX, "admin listener full: connections wait");
                let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
                permit
            }
        };
        while connections.try_join_next().is_some() {}
        let Ok((socket, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        connections.spawn(async move {
            let _permit = permit;
            let served = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(header_time)
                .serve_connection(TokioIo::new(socket), service)
                .await;
            if let Err(error) = served {
                tracing::debug!(%error, "admin connection closed early");
            }
        });
    }
}
