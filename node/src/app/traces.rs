//! Traces of the node, if it has a collector.

use super::StartError;
use crate::config::Config;
use crate::origin::targets::client_tls;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::traces::{self, Collector};

/// Begins to trace. The exporter ends with the last tasks, so that the spans of a drain are sent too.
pub(super) fn begin(config: &Config, node_id: &str, last_tasks: &Tasks) -> Result<(), StartError> {
    let Some(url) = &config.otlp_endpoint else { return Ok(()) };
    const DOING: &str = "cannot send traces (--otlp-endpoint)";
    let tls = client_tls().map_err(StartError::at(DOING))?;
    let collector = Collector::new(url, tls).map_err(StartError::at(DOING))?;
    let Some(exporter) = traces::begin(collector, config.trace_sample_ratio, node_id) else {
        tracing::warn!("tracing already started in this process");
        return Ok(());
    };
    last_tasks.spawn("traces", OnStop::Finish, exporter.run(last_tasks.stopping()));
    Ok(())
}
