//! The collector that traces are posted to.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use reqwest::redirect::Policy;
use rustls::ClientConfig;

use super::CollectorUrl;
use crate::telemetry::RATE_LIMITED;

/// Time from the connect to the end of the answer.
const TIMEOUT: Duration = Duration::from_secs(5);
const IDLE: Duration = Duration::from_secs(30);
/// Answer size beyond which the answer is not read.
const ANSWER_BYTES: usize = 64 * 1024;

/// Posts to one collector; sends each batch once, whatever the result.
#[derive(Debug)]
pub struct Collector(pub(super) SpanExporter);

impl Collector {
    /// Builds the client. `OTEL_EXPORTER_OTLP_HEADERS` may contain headers for it.
    ///
    /// # Errors
    /// This machine has no client for it, or the environment has an invalid setting of OTLP.
    pub fn new(
        url: &CollectorUrl,
        tls: ClientConfig,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let client = reqwest::Client::builder()
            .use_preconfigured_tls(tls)
            .http1_only()
            .redirect(Policy::none())
            .no_proxy()
            .referer(false)
            .timeout(TIMEOUT)
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(1)
            .build()?;
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(CollectorClient(client))
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(url.traces())
            .with_timeout(TIMEOUT)
            .with_retry_policy(RetryPolicy::disabled())
            .build()?;
        Ok(Self(exporter))
    }
}

#[derive(Debug)]
struct CollectorClient(reqwest::Client);

/// The innermost error; the outer ones contain the address.
fn log_failure(error: &reqwest::Error) {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    tracing::warn!(target: RATE_LIMITED, %cause, "trace collector unreachable");
}

#[async_trait]
impl HttpClient for CollectorClient {
    async fn send_bytes(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let mut answer = self.0.execute(request.try_into()?).await.inspect_err(log_failure)?;
        let mut response = http::Response::builder().status(answer.status());
        if let Some(headers) = response.headers_mut() {
            *headers = std::mem::take(answer.headers_mut());
        }
        let mut body = Vec::new();
        while let Some(part) = answer.chunk().await? {
            if body.len() + part.len() > ANSWER_BYTES {
                return Err("the answer is too long".into());
            }
            body.extend_from_slice(&part);
        }
        Ok(response.body(body.into())?)
    }
}
