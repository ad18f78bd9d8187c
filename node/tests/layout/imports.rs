//! Uses between modules: the table of `docs/architecture.md` is the rule.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Tree, is_ident, line_of, words};

/// Module → what it may use. `proto` and `client` stand for the two library crates.
pub(crate) struct Rules(BTreeMap<String, Uses>);

enum Uses {
    All,
    These(BTreeSet<String>),
}

impl Rules {
    /// Reads the table headed `| module | … | may use |`: names in backticks, `all` or `–`. Modules of one row may use each other.
    pub(crate) fn parse(page: &str) -> Self {
        let table =
            page.lines().skip_while(|line| !(line.starts_with("| module |") && line.contains("may use")));
        let rows = table.skip(2).take_while(|line| line.starts_with('|'));
        let mut rules = BTreeMap::new();
        for row in rows {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            assert_eq!(cells.len(), 3, "three cells are expected in {row}");
            let (modules, uses) = (cells[0], cells[2]);
            for module in quoted(modules) {
                let these = quoted(uses).chain(quoted(modules)).collect();
                let uses = if uses == "all" { Uses::All } else { Uses::These(these) };
                rules.insert(module, uses);
            }
        }
        assert!(!rules.is_empty(), "the page has no table of modules");
        Self(rules)
    }
}

/// The names in backticks of a cell, without `.rs` and `/`.
fn quoted(cell: &str) -> impl Iterator<Item = String> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .map(|name| name.trim_end_matches(".rs").trim_end_matches('/').to_owned())
}

pub(crate) fn check(tree: &Tree, rules: &Rules) -> Vec<String> {
    let mut findings = Vec::new();
    for (path, code) in tree.product_code() {
        let Some(module_path) = module_path(path) else { continue };
        let Some(module) = module_path.first() else { continue };
        let Some(uses) = rules.0.get(module) else {
            findings.push(format!("{path}: module {module} has no row in docs/architecture.md"));
            continue;
        };
        let Uses::These(allowed) = uses else { continue };
        for (at, used) in used_modules(&code, module_path.len()) {
            let known = rules.0.contains_key(&used) || used == "proto" || used == "client";
            if known && used != *module && !allowed.contains(&used) {
                let line = line_of(&code, at);
                findings.push(format!("{path}:{line}: {module} may not use {used} (docs/architecture.md)"));
            }
        }
    }
    findings
}

/// `["auth", "token"]` for `node/src/auth/token.rs`; none outside the node or for its root.
fn module_path(path: &str) -> Option<Vec<String>> {
    let inside = path.strip_prefix("node/src/")?.strip_suffix(".rs")?;
    if inside == "lib" {
        return None;
    }
    Some(inside.trim_end_matches("/mod").split('/').map(str::to_owned).collect())
}

/// The top-level modules and library crates that the code names, each with its offset.
fn used_modules(code: &str, depth: usize) -> Vec<(usize, String)> {
    let mut used = Vec::new();
    for root in ["crate", "fanfare"] {
        for at in words(code, root) {
            used.extend(heads(&code[at + root.len()..]).into_iter().map(|head| (at, head)));
        }
    }
    for at in words(code, "super").filter(|&at| !code[..at].ends_with("::")) {
        let chain = &code[at..];
        let hops = chain.split("::").take_while(|part| *part == "super").count();
        if hops == depth {
            used.extend(heads(&chain[hops * "super::".len() - 2..]).into_iter().map(|head| (at, head)));
        }
    }
    for (name, stands_for) in [("fanfare_proto", "proto"), ("fanfare_client", "client")] {
        used.extend(words(code, name).map(|at| (at, stands_for.to_owned())));
    }
    used
}

/// First names after a path root: `::a::b` gives a, `::{a::{x, y}, b}` gives a and b.
fn heads(rest: &str) -> Vec<String> {
    let Some(rest) = rest.strip_prefix("::") else { return Vec::new() };
    let Some(group) = rest.strip_prefix('{') else { return first_name(rest).into_iter().collect() };
    let mut heads = Vec::new();
    let mut depth = 0usize;
    let mut expected = true;
    for (at, byte) in group.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => break,
            b'}' => depth -= 1,
            b',' if depth == 0 => expected = true,
            _ if expected && is_ident(byte) => {
                heads.extend(first_name(&group[at..]));
                expected = false;
            }
            _ => {}
        }
    }
    heads
}

fn first_name(text: &str) -> Option<String> {
    let name: String = text.bytes().take_while(|&b| is_ident(b)).map(char::from).collect();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
const PAGE: &str = "\
text
| module | its one job | may use |
|---|---|---|
| `main.rs`, `cli/` | x | `app`, `client` |
| `app.rs` | x | all |
| `model/` | x | – |
| `auth/` | x | `model`, `proto` |
| `hub/` | x | `model` |

| `other/` | x | all |
";

#[cfg(test)]
fn findings_of(path: &str, code: &str) -> Vec<String> {
    check(&Tree::of_samples(&[(path, code)]), &Rules::parse(PAGE))
}

#[test]
fn a_forbidden_import_is_found_in_every_form() {
    let forms = [
        "use crate::hub::Hub;",
        "use crate::{model::Clock, hub::{Hub, Inbox}};",
        "use crate::{\n    model,\n    hub,\n};",
        "fn f() { crate::hub::g() }",
        "use super::super::hub::Hub;",
        "use fanfare_client::Client;",
    ];
    for form in forms {
        assert_eq!(findings_of("node/src/auth/token.rs", form).len(), 1, "{form}");
    }
    assert_eq!(findings_of("node/src/auth/mod.rs", "use super::hub::Hub;").len(), 1);
    assert_eq!(findings_of("node/src/model/mod.rs", "use fanfare_proto::frame;").len(), 1);
    assert_eq!(findings_of("node/src/main.rs", "use fanfare::hub::Hub;").len(), 1);
}

#[test]
fn allowed_imports_yield_no_findings() {
    let allowed = "use crate::model::Clock; use super::hub; use fanfare_proto::token; use crate::auth::x; // crate::hub::X\n\
                   #[cfg(test)]\nmod tests { use crate::hub::Hub; }";
    assert_eq!(findings_of("node/src/auth/token.rs", allowed), [""; 0]);
    assert_eq!(findings_of("node/src/app.rs", "use crate::{hub, auth};"), [""; 0]);
    assert_eq!(findings_of("node/src/main.rs", "use fanfare::cli;"), [""; 0]);
    assert_eq!(findings_of("node/src/cli/sub.rs", "use fanfare::app; use fanfare_client::Client;"), [""; 0]);
}

#[test]
fn a_module_without_a_row_is_found() {
    assert_eq!(findings_of("node/src/other/mod.rs", "").len(), 1);
}
