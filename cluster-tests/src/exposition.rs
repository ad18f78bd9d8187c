//! Metrics of a node, read from the text format of Prometheus.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Node, http};

/// All series of one metric.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Metric {
    pub kind: String,
    pub help: String,
    /// Names of the labels of all series, without `le` of a histogram.
    pub labels: BTreeSet<String>,
    pub series: usize,
}

/// Scrapes a node; gives the metrics by name.
pub async fn scrape(node: &Node) -> BTreeMap<String, Metric> {
    let page = http::request(node.admin(), "GET", "/metrics", &[], "").await;
    assert_eq!(page.status, 200);
    parse(std::str::from_utf8(&page.body).expect("text"))
}

/// Parses a page. Fails the test on a line that is not of the format.
pub fn parse(page: &str) -> BTreeMap<String, Metric> {
    let mut metrics = BTreeMap::<String, Metric>::new();
    for line in page.lines().filter(|line| !line.is_empty()) {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap_or((help, ""));
            metrics.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect(line);
            metrics.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else {
            let (series, _value) = line.rsplit_once(' ').expect(line);
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let is_histogram = |name: &&str| metrics.get(*name).is_some_and(|own| own.kind == "histogram");
            let mut parts = ["_bucket", "_sum", "_count"].iter().filter_map(|part| name.strip_suffix(part));
            let base = parts.find(is_histogram);
            let metric = metrics.entry(base.unwrap_or(name).to_owned()).or_default();
            let own = labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('='));
            let own = own.map(|(label, _)| label).filter(|label| base.is_none() || *label != "le");
            metric.labels.extend(own.map(str::to_owned));
            metric.series += 1;
        }
    }
    metrics
}

#[test]
fn series_of_a_histogram_are_one_metric() {
    let page = "# HELP a_seconds How long\n# TYPE a_seconds histogram\na_seconds_bucket{store=\"x\",le=\"0.1\"} 1\n\
        a_seconds_sum{store=\"x\"} 1\na_seconds_count{store=\"x\"} 1\n\n# TYPE b_count gauge\nb_count 1\n";
    let metrics = parse(page);
    assert_eq!(metrics.keys().collect::<Vec<_>>(), ["a_seconds", "b_count"]);
    let histogram = &metrics["a_seconds"];
    assert_eq!((histogram.help.as_str(), histogram.series), ("How long", 3));
    assert_eq!(histogram.labels, BTreeSet::from(["store".to_owned()]));
}
