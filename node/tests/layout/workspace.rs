//! Crates depend in one direction: proto ← clients/rust ← node ← cluster-tests and benches.

use crate::source::Tree;

/// Crate folder and the workspace crates it may depend on.
const ARROWS: &[(&str, &[&str])] = &[
    ("proto", &[]),
    ("clients/rust", &["fanfare-proto"]),
    ("node", &["fanfare-proto", "fanfare-client"]),
    ("cluster-tests", &["fanfare", "fanfare-proto", "fanfare-client"]),
    ("benches", &["fanfare", "fanfare-proto", "fanfare-client"]),
];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let mut findings = Vec::new();
    for (path, manifest) in tree.files() {
        let Some(folder) = path.strip_suffix("/Cargo.toml") else { continue };
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == folder) else {
            findings.push(format!("{path}: a crate without a line in node/tests/layout/workspace.rs"));
            continue;
        };
        let forbidden =
            workspace_crates(manifest).into_iter().filter(|name| !allowed.contains(&name.as_str()));
        findings.extend(forbidden.map(|name| format!("{path}: {folder} may not depend on {name}")));
    }
    findings
}

/// Names of this workspace's crates among the dependencies of a manifest, of every kind.
fn workspace_crates(manifest: &str) -> Vec<String> {
    let mut crates = Vec::new();
    let mut in_dependencies = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            in_dependencies = section.ends_with("dependencies");
            let table = section.rsplit_once("dependencies.").map(|(_, name)| name);
            crates.extend(table.filter(|name| is_ours(name)).map(str::to_owned));
            continue;
        }
        let key = line.split(['.', ' ', '=']).next().unwrap_or_default().trim_matches('"');
        let renamed = line.split_once("package = \"").and_then(|(_, rest)| rest.split('"').next());
        let name = renamed.unwrap_or(key);
        if in_dependencies && is_ours(name) {
            crates.push(name.to_owned());
        }
    }
    crates
}

fn is_ours(name: &str) -> bool {
    name == "fanfare" || name.starts_with("fanfare-")
}

#[test]
fn an_arrow_backwards_is_found() {
    let backwards = [
        ("proto/Cargo.toml", "[dependencies]\nfanfare-client.workspace = true"),
        ("proto/Cargo.toml", "[dev-dependencies]\nfanfare = { path = \"../node\" }"),
        ("clients/rust/Cargo.toml", "[dependencies.fanfare]\nworkspace = true"),
        (
            "clients/rust/Cargo.toml",
            "[target.'cfg(unix)'.dependencies]\nnode = { package = \"fanfare\", path = \"x\" }",
        ),
        ("node/Cargo.toml", "[dev-dependencies]\nfanfare-benches.workspace = true"),
        ("surprise/Cargo.toml", ""),
    ];
    for (path, manifest) in backwards {
        assert_eq!(check(&Tree::of_samples(&[(path, manifest)])).len(), 1, "{path}: {manifest}");
    }
}

#[test]
fn arrows_forwards_are_fine() {
    let manifest = "[package]\nname = \"fanfare\"\n[dependencies]\nfanfare-proto.workspace = true\nfanfare-client.workspace = true";
    assert_eq!(check(&Tree::of_samples(&[("node/Cargo.toml", manifest)])), [""; 0]);
}
