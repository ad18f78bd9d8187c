//! Work that a node does every few seconds or minutes.

use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;

use super::operators::Operators;
use super::tokens;
use crate::accounts::Accounts;
use crate::auth::Authenticator;
use crate::hub::Hub;
use crate::model::Clock;
use crate::origin::history::HistoryStore;
use crate::origin::metering::Meter;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry;

const METRICS_UPKEEP_EVERY: Duration = Duration::from_secs(5);
/// Interval at which expired rows are dropped.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Longest interval between sweeps of the replay buffers.
const BUFFERS_SWEEP_MS_MAX: u64 = 5_000;

/// Starts the upkeep of the directory, the usage counts, the memory and the metrics.
pub(super) fn begin(
    tasks: &Tasks,
    accounts: Arc<Accounts>,
    meter: &Arc<Meter>,
    metrics: PrometheusHandle,
    operators: &Arc<Operators>,
) {
    telemetry::measure_process();
    operators.set_gauges();
    tasks.spawn("memory", OnStop::Cancel, operators.memory().watch());
    tasks.spawn("metrics upkeep", OnStop::Cancel, measure(metrics, Arc::clone(operators)));
    tasks.spawn("directory", OnStop::Cancel, accounts.watch());
    tasks.spawn("metering", OnStop::Cancel, Arc::clone(meter).run());
}

/// Starts the removal of expired rows and recent messages.
pub(super) fn sweep(
    tasks: &Tasks,
    store: &Arc<dyn HistoryStore>,
    auth: &Arc<Authenticator>,
    clock: Clock,
    hub: Arc<Hub>,
    window_ms: u64,
) {
    tasks.spawn("sweep", OnStop::Cancel, sweep_store(Arc::clone(store), Arc::clone(auth), clock));
    if store.is_shared() {
        let followed = tokens::follow_revocations(Arc::clone(store), Arc::clone(auth));
        tasks.spawn("revocations", OnStop::Cancel, followed);
    }
    tasks.spawn("replay buffers", OnStop::Cancel, sweep_replay_buffers(hub, window_ms));
}

async fn sweep_replay_buffers(hub: Arc<Hub>, window_ms: u64) {
    let every = Duration::from_millis((window_ms / 8).clamp(100, BUFFERS_SWEEP_MS_MAX));
    loop {
        tokio::time::sleep(every).await;
        let hub = Arc::clone(&hub);
        if tokio::task::spawn_blocking(move || hub.sweep()).await.is_err() {
            tracing::error!("replay buffer sweep failed");
        }
    }
}

async fn measure(metrics: PrometheusHandle, operators: Arc<Operators>) {
    loop {
        tokio::time::sleep(METRICS_UPKEEP_EVERY).await;
        metrics.run_upkeep();
        telemetry::log_held_back();
        telemetry::count_dropped_lines();
        telemetry::measure_process();
        operators.set_gauges();
    }
}

async fn sweep_store(store: Arc<dyn HistoryStore>, auth: Arc<Authenticator>, clock: Clock) {
    loop {
        tokio::time::sleep(SWEEP_EVERY).await;
        auth.forget_ended_revocations();
        let (store, now_ms) = (Arc::clone(&store), clock.expiry_ms());
        let swept = tokio::task::spawn_blocking(move || store.sweep(now_ms)).await;
        if let Ok(Err(error)) = swept {
            tracing::warn!(%error, "deletion of expired history failed");
        }
    }
}
