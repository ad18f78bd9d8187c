//! Traces: spans of requests, publishes and deliveries, sent to a collector by OTLP.
//!
//! Off, or not sampled, a `TraceSpan` is an empty option: starting one reads a static and allocates nothing. The serving code ends its
//! spans into a bounded queue and never waits for the collector.

mod collector;
mod export;
mod settings;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr as _;
use std::sync::OnceLock;

use fanfare_proto::trace::{TRACEPARENT, TRACESTATE, TraceContext};
use http::{HeaderMap, Method};
use opentelemetry::trace::{
    Link, Span as _, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags,
    TraceId, TraceState, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider, Span as Recorded};

pub use collector::Collector;
pub use export::Exporter;
use export::SpanQueue;
pub(super) use export::begin_to_count;
pub use settings::{CollectorUrl, SampleRatio};

/// The name of the node in `messaging.system`, and its service name unless the environment gives one.
const SYSTEM: &str = "fanfare";
/// Methods that a span names; any other text of a client is left out.
const METHODS: [Method; 9] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::DELETE,
    Method::CONNECT,
    Method::OPTIONS,
    Method::TRACE,
    Method::PATCH,
];

/// The recorder that all nodes of the process share.
static TRACING: OnceLock<TraceRecorder> = OnceLock::new();

struct TraceRecorder {
    tracer: SdkTracer,
    /// Whether traces begin here; if false, a span needs a sampled parent.
    begins: bool,
}

/// Kinds of spans, as in OpenTelemetry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceSpanKind {
    Internal,
    Client,
    Server,
    Producer,
    Consumer,
}

/// Begins to record spans for the process. Returns the exporter that sends them, which the caller must run; none if recording had begun
/// before.
pub fn begin(collector: Collector, ratio: SampleRatio, node_id: &str) -> Option<Exporter> {
    let (queued, ended) = export::queue();
    let (tracing, resource) = tracing(queued, ratio, node_id);
    TRACING.set(tracing).ok()?;
    Some(Exporter::new(collector, &resource, ended))
}

fn tracing(queued: SpanQueue, ratio: SampleRatio, node_id: &str) -> (TraceRecorder, Resource) {
    let resource = resource(node_id);
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio.get())));
    let provider = SdkTracerProvider::builder()
        .with_span_processor(queued)
        .with_sampler(sampler)
        .with_resource(resource.clone())
        .build();
    (TraceRecorder { tracer: provider.tracer(SYSTEM), begins: ratio.get() > 0.0 }, resource)
}

/// The resource of the node; `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` take precedence.
fn resource(node_id: &str) -> Resource {
    let of_environment = Resource::builder().build();
    let unnamed = of_environment.get(&"service.name".into());
    let is_unnamed = unnamed.is_none_or(|name| name.as_str().starts_with("unknown_service"));
    let own = [
        ("service.name", SYSTEM),
        ("service.instance.id", node_id),
        ("service.version", env!("CARGO_PKG_VERSION")),
    ];
    let missing = own.into_iter().filter(|(name, _)| match *name {
        "service.name" => is_unnamed,
        name => of_environment.get(&name.into()).is_none(),
    });
    let missing = missing.map(|(name, value)| KeyValue::new(name, value.to_owned()));
    Resource::builder().with_attributes(missing).build()
}

/// One span, which ends when dropped.
#[derive(Default)]
pub struct TraceSpan(Option<Box<Recorded>>);

impl TraceSpan {
    /// The server's span of an HTTP request. `route` is the template of the path.
    pub fn of_request(method: &Method, route: &'static str, headers: &HeaderMap) -> Self {
        TRACING.get().map_or_else(Self::default, |tracing| tracing.of_request(method, route, headers))
    }

    /// The root span of a trace, subject to the sample ratio.
    #[inline]
    pub fn first(name: &'static str, kind: TraceSpanKind) -> Self {
        match TRACING.get() {
            Some(tracing) => tracing.start(None, name, kind, Vec::new()),
            None => Self::default(),
        }
    }

    /// A child span of a local or remote parent; empty without one.
    #[inline]
    pub fn within(parent: Option<&TraceContext>, name: &'static str, kind: TraceSpanKind) -> Self {
        match parent {
            Some(parent) => Self::linked(parent, &[], name, kind),
            None => Self::default(),
        }
    }

    /// A child span that also links other spans.
    pub fn linked(
        parent: &TraceContext,
        links: &[&TraceContext],
        name: &'static str,
        kind: TraceSpanKind,
    ) -> Self {
        let Some(tracing) = TRACING.get() else { return Self::default() };
        let links = links.iter().map(|context| Link::with_context(remote(context))).collect();
        tracing.start(Some(parent), name, kind, links)
    }

    /// The context for child spans; none if the span is not recorded.
    #[inline]
    pub fn context(&self) -> Option<Box<TraceContext>> {
        let context = self.0.as_ref()?.span_context();
        Some(Box::new(TraceContext {
            trace_id: context.trace_id().to_bytes(),
            span_id: context.span_id().to_bytes(),
            is_sampled: true,
            state: context.trace_state().header().into(),
        }))
    }

    #[inline]
    pub fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    /// Sets an attribute. The value is computed only if the span is recorded, and must not be a secret.
    #[inline]
    pub fn set(&mut self, name: &'static str, value: impl FnOnce() -> Value) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new(name, value()));
        }
    }

    /// Marks the operation as failed. `reason` is one word, without client data or secrets.
    #[inline]
    pub fn fail(&mut self, reason: &'static str) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new("error.type", reason));
            span.set_status(Status::error(reason));
        }
    }

    /// Sets the channel and the number of messages that the span is about.
    pub fn concerns(&mut self, channel: &str, messages: usize) {
        let Some(span) = &mut self.0 else { return };
        span.set_attribute(KeyValue::new("messaging.system", SYSTEM));
        span.set_attribute(KeyValue::new("messaging.destination.name", channel.to_owned()));
        if messages > 1 {
            let messages = i64::try_from(messages).unwrap_or(i64::MAX);
            span.set_attribute(KeyValue::new("messaging.batch.message_count", messages));
        }
    }

    /// Sets the status of the answer to the request.
    pub fn answered(&mut self, status: u16) {
        let Some(span) = &mut self.0 else { return };
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        if status >= 500 {
            span.set_attribute(KeyValue::new("error.type", status.to_string()));
            span.set_status(Status::error(""));
        }
    }
}

impl fmt::Debug for TraceSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Span").field(&self.is_recorded()).finish()
    }
}

impl TraceRecorder {
    fn of_request(&self, method: &Method, route: &'static str, headers: &HeaderMap) -> TraceSpan {
        let method = if METHODS.contains(method) { method.as_str() } else { "_OTHER" };
        let name = format!("{method} {route}");
        let mut span = self.start(context_of(headers).as_ref(), name, TraceSpanKind::Server, Vec::new());
        span.set("http.request.method", || method.to_owned().into());
        span.set("http.route", || route.into());
        span
    }

    fn start(
        &self,
        parent: Option<&TraceContext>,
        name: impl Into<std::borrow::Cow<'static, str>>,
        kind: TraceSpanKind,
        links: Vec<Link>,
    ) -> TraceSpan {
        if !parent.map_or(self.begins, |parent| parent.is_sampled) {
            return TraceSpan::default();
        }
        let root = Context::new();
        let context = match parent {
            Some(parent) => root.with_remote_span_context(remote(parent)),
            None => root,
        };
        let mut builder = SpanBuilder::from_name(name).with_kind(kind.into());
        if !links.is_empty() {
            builder = builder.with_links(links);
        }
        let span = self.tracer.build_with_context(builder, &context);
        TraceSpan(span.is_recording().then(|| Box::new(span)))
    }
}

impl From<TraceSpanKind> for SpanKind {
    fn from(kind: TraceSpanKind) -> Self {
        match kind {
            TraceSpanKind::Internal => Self::Internal,
            TraceSpanKind::Client => Self::Client,
            TraceSpanKind::Server => Self::Server,
            TraceSpanKind::Producer => Self::Producer,
            TraceSpanKind::Consumer => Self::Consumer,
        }
    }
}

fn remote(context: &TraceContext) -> SpanContext {
    let flags = if context.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::NOT_SAMPLED };
    let state = TraceState::from_str(&context.state).unwrap_or_default();
    SpanContext::new(
        TraceId::from_bytes(context.trace_id),
        SpanId::from_bytes(context.span_id),
        flags,
        true,
        state,
    )
}

/// The trace context of a request's headers, if well formed: one `traceparent`, and any number of `tracestate`.
fn context_of(headers: &HeaderMap) -> Option<TraceContext> {
    let mut parents = headers.get_all(TRACEPARENT).iter();
    let (parent, None) = (parents.next()?, parents.next()) else { return None };
    let states = headers.get_all(TRACESTATE).iter().map(|state| state.to_str());
    let state = states.collect::<Result<Vec<_>, _>>().unwrap_or_default().join(",");
    TraceContext::parse(parent.to_str().ok()?, &state)
}
