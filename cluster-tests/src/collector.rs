//! A collector of traces, which takes OTLP over HTTP.

use std::collections::HashMap;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::{Link, SpanKind};
use prost::Message as _;

use crate::receiver::{Answer, ReceivedRequest, Receiver};
use crate::{NodeOptions, SOON, wait_for};

/// Collector, which listens until it is dropped.
pub struct Collector {
    receiver: Receiver,
}

/// A span that a node has sent. Ids are in lower-case hex.
#[derive(Debug, Clone)]
pub struct Span {
    /// `service.instance.id`
    pub node: String,
    pub name: String,
    pub kind: SpanKind,
    pub trace: String,
    pub id: String,
    /// Id of the parent span; empty: none.
    pub parent: String,
    /// Trace and span ids of the links.
    pub links: Vec<(String, String)>,
    /// Attributes, with their values as text.
    pub attributes: HashMap<String, String>,
    pub is_ended: bool,
}

impl Collector {
    pub async fn start() -> Self {
        Self { receiver: Receiver::start().await }
    }

    /// Sets a node to send its traces here, with this sampling ratio for requests without a parent.
    pub fn traced(&self, options: NodeOptions, ratio: &str) -> NodeOptions {
        let endpoint = format!("http://{}", self.receiver.addr());
        options
            .environment("FANFARE_OTLP_ENDPOINT", &endpoint)
            .environment("FANFARE_TRACE_SAMPLE_RATIO", ratio)
    }

    pub fn answer(&self, answer: Answer) {
        self.receiver.answer(answer);
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.receiver.received()
    }

    /// All spans so far.
    pub fn spans(&self) -> Vec<Span> {
        self.receiver.received().iter().flat_map(|request| spans_of(&request.body)).collect()
    }

    /// Waits until the trace has spans of exactly these nodes and names, in any order.
    pub async fn trace(&self, trace: &str, expected: &[(&str, &str)]) -> Vec<Span> {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        let what = format!("the spans {expected:?}");
        wait_for(SOON, &what, async || {
            let spans: Vec<_> = self.spans().into_iter().filter(|span| span.trace == trace).collect();
            let mut names: Vec<_> = spans.iter().map(|span| (&*span.node, &*span.name)).collect();
            names.sort_unstable();
            (names == expected).then(|| spans.clone())
        })
        .await
    }
}

fn spans_of(body: &[u8]) -> Vec<Span> {
    let request = ExportTraceServiceRequest::decode(body).expect("a request of OTLP");
    let mut spans = Vec::new();
    for of_node in request.resource_spans {
        let attributes = texts(of_node.resource.unwrap_or_default().attributes);
        let node = attributes.get("service.instance.id").cloned().unwrap_or_default();
        for span in of_node.scope_spans.into_iter().flat_map(|of_scope| of_scope.spans) {
            let link = |link: &Link| (hex(&link.trace_id), hex(&link.span_id));
            spans.push(Span {
                node: node.clone(),
                kind: span.kind(),
                trace: hex(&span.trace_id),
                id: hex(&span.span_id),
                parent: hex(&span.parent_span_id),
                links: span.links.iter().map(link).collect(),
                is_ended: span.end_time_unix_nano >= span.start_time_unix_nano,
                attributes: texts(span.attributes),
                name: span.name,
            });
        }
    }
    spans
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(attributes: Vec<KeyValue>) -> HashMap<String, String> {
    attributes.into_iter().map(|KeyValue { key, value, .. }| (key, text(value))).collect()
}

fn text(value: Option<AnyValue>) -> String {
    match value.and_then(|value| value.value) {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}
