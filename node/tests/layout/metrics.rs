//! Every metric says what it counts: on `/metrics`, and to operators.

use std::collections::BTreeSet;

use crate::source::Tree;

const TABLES: &[&str] = &["node/src/telemetry.rs", "node/src/telemetry/help.rs"];
const PAGE: &str = "docs/operations/metrics.md";

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let described: BTreeSet<String> = TABLES
        .iter()
        .flat_map(|path| names(&tree.text(path)).map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let page = tree.text(PAGE);
    let mut findings = Vec::new();
    for (path, text) in tree.rust_files().filter(|(path, _)| path.starts_with("node/src/")) {
        for name in names(text) {
            if !described.contains(name) {
                findings.push(format!("{path}: {name} has no help in {}", TABLES[1]));
            }
            if !page.contains(&format!("| `{name}` |")) {
                findings.push(format!("{path}: {name} has no row in {PAGE}"));
            }
        }
    }
    findings
}

/// Literals that are a whole name of a metric.
fn names(text: &str) -> impl Iterator<Item = &str> {
    let is_name = |literal: &&str| {
        literal.starts_with("fanfare_") && literal.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')
    };
    text.split('"').filter(is_name)
}

#[test]
fn a_metric_without_help_or_row_is_found() {
    let tree = Tree::of_samples(&[
        ("node/src/a.rs", r#"f("fanfare_a_total"); g("fanfare_b_total", "fanfare_ text")"#),
        ("node/src/telemetry.rs", r#"("fanfare_a_total", "A")"#),
        ("node/src/telemetry/help.rs", ""),
        ("docs/operations/metrics.md", "| `fanfare_a_total` | counter | a |"),
    ]);
    let findings = check(&tree);
    assert_eq!(findings.len(), 2, "{findings:?}");
    assert!(findings.iter().all(|finding| finding.contains("fanfare_b_total")));
}
