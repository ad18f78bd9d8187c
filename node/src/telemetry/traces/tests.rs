use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use opentelemetry::trace::SpanId;
use opentelemetry_sdk::trace::SpanData;
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::mpsc::Receiver;
use tokio_util::sync::CancellationToken;

use super::*;

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn recorder(ratio: &str) -> (TraceRecorder, Receiver<SpanData>) {
    let (queued, ended) = export::queue();
    (tracing(queued, SampleRatio::parse(ratio).expect("a ratio"), "n1").0, ended)
}

fn headers(given: &[(&'static str, &str)]) -> HeaderMap {
    let pairs = given.iter().map(|(name, value)| {
        (http::HeaderName::from_static(name), http::HeaderValue::from_str(value).expect("a value"))
    });
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(name, value);
    }
    headers
}

fn collector(url: &str) -> Collector {
    let tls = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    Collector::new(&CollectorUrl::parse(url).expect("a URL"), tls).expect("a client")
}

#[test]
fn spans_that_are_not_recorded_are_a_null_pointer() {
    assert_eq!(size_of::<TraceSpan>(), size_of::<usize>());
    let mut span = TraceSpan::first("publish", TraceSpanKind::Producer);
    span.set("never", || unreachable!("nothing is recorded"));
    assert!(!span.is_recorded() && span.context().is_none());
    assert!(
        !TraceSpan::within(TraceContext::parse(PARENT, "").as_ref(), "store", TraceSpanKind::Internal)
            .is_recorded()
    );
}

#[test]
fn a_request_is_within_the_span_of_its_headers() {
    let (tracing, mut ended) = recorder("0");
    let given = headers(&[("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]);
    let mut span = tracing.of_request(&Method::POST, "/time", &given);
    let context = span.context().expect("it is recorded");
    assert_eq!(context.parent()[..35], PARENT[..35], "the same trace");
    assert_ne!(context.parent(), PARENT, "another span");
    assert_eq!(&*context.state, "a=1,b=2");
    span.answered(503);
    drop(span);
    let data = ended.try_recv().expect("it has ended");
    assert_eq!(
        (&*data.name, data.parent_span_id),
        ("POST /time", SpanId::from_hex("00f067aa0ba902b7").expect("an id"))
    );
    let mut attributes: Vec<_> =
        data.attributes.iter().map(|pair| format!("{}={}", pair.key, pair.value)).collect();
    attributes.sort();
    let expected =
        ["error.type=503", "http.request.method=POST", "http.response.status_code=503", "http.route=/time"];
    assert_eq!(attributes, expected);
    assert_eq!(data.status, Status::error(""));
}

#[test]
fn sampling_follows_the_parent_and_else_the_ratio() {
    let unsampled = PARENT.replace("-01", "-00");
    let upper = PARENT.to_uppercase();
    for (ratio, given, is_recorded) in [
        ("0", vec![("traceparent", PARENT)], true),
        ("0", vec![], false),
        ("0", vec![("traceparent", &*upper)], false),
        ("1", vec![("traceparent", &*unsampled)], false),
        ("1", vec![], true),
        ("1", vec![("traceparent", &*upper)], true),
        ("1", vec![("traceparent", &*unsampled), ("traceparent", &*unsampled)], true),
    ] {
        let (tracing, _ended) = recorder(ratio);
        let span = tracing.of_request(&Method::GET, "/time", &headers(&given));
        assert_eq!(span.is_recorded(), is_recorded, "{ratio} {given:?}");
        let is_same = span.context().is_some_and(|context| context.parent()[..35] == PARENT[..35]);
        assert_eq!(is_same, is_recorded && given.iter().any(|(_, value)| *value == PARENT), "{given:?}");
    }
}

#[test]
fn methods_of_a_clients_choice_are_not_recorded() {
    let (tracing, mut ended) = recorder("1");
    drop(tracing.of_request(&Method::from_bytes(b"HUSH").expect("a method"), "/time", &HeaderMap::new()));
    assert_eq!(&*ended.try_recv().expect("it has ended").name, "_OTHER /time");
}

#[test]
fn spans_beyond_the_queue_are_dropped() {
    let (tracing, mut ended) = recorder("1");
    for _ in 0..export::QUEUE + 100 {
        drop(tracing.start(None, "publish", TraceSpanKind::Producer, Vec::new()));
    }
    let mut waiting = 0;
    while ended.try_recv().is_ok() {
        waiting += 1;
    }
    assert_eq!(waiting, export::QUEUE);
}

#[test]
fn trace_resource_names_service_node_and_version() {
    let resource = resource("n1");
    let of = |name: &'static str| resource.get(&name.into()).map(|value| value.to_string());
    assert_eq!(of("service.name").as_deref(), Some("fanfare"));
    assert_eq!(of("service.instance.id").as_deref(), Some("n1"));
    assert_eq!(of("service.version").as_deref(), Some(env!("CARGO_PKG_VERSION")));
}

#[tokio::test]
async fn a_stop_does_not_wait_for_a_collector_that_hangs() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let (queued, ended) = export::queue();
    let (tracing, resource) = tracing(queued, SampleRatio::parse("1").expect("a ratio"), "n1");
    drop(tracing.start(None, "publish", TraceSpanKind::Producer, Vec::new()));
    let (stopping, begun) = (CancellationToken::new(), Instant::now());
    stopping.cancel();
    Exporter::new(collector(&url), &resource, ended).run(stopping).await;
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    drop(listener);
}
