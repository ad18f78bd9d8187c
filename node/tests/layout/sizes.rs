//! Files of at most 500 lines, functions of at most 100; the few exceptions may only shrink.

use std::collections::BTreeMap;

use crate::source::{Tree, code_only, is_ident, item_end, line_of, words};

const FILE_LINES_MAX: usize = 500;
const FUNCTION_LINES_MAX: usize = 100;
/// The first words of a file that a program wrote and nobody reads from top to bottom.
const GENERATED: &str = "// This file is @generated";

/// `path` or `path::function` → lines, for what is over its limit.
pub(crate) fn measure(tree: &Tree) -> BTreeMap<String, usize> {
    let mut over = BTreeMap::new();
    for (path, text) in tree.rust_files().filter(|(_, text)| !text.starts_with(GENERATED)) {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            over.insert(path.to_owned(), lines);
        }
        for (name, lines) in functions(&code_only(text)).filter(|(_, lines)| *lines > FUNCTION_LINES_MAX) {
            let longest = over.entry(format!("{path}::{name}")).or_insert(0);
            *longest = lines.max(*longest);
        }
    }
    over
}

fn functions(code: &str) -> impl Iterator<Item = (String, usize)> {
    words(code, "fn").filter_map(|at| {
        let name: String =
            code[at + 2..].trim_start().bytes().take_while(|&b| is_ident(b)).map(char::from).collect();
        let lines = line_of(code, item_end(code, at)) - line_of(code, at) + 1;
        (!name.is_empty()).then_some((name, lines))
    })
}

/// Compares with the ratchet: lines of `<path or path::function> <lines>`, `#` begins a comment.
pub(crate) fn check(over: &BTreeMap<String, usize>, ratchet: &str) -> Vec<String> {
    let entries: BTreeMap<&str, usize> = ratchet
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (name, lines) = line.rsplit_once(' ').expect("an entry is a name and a number");
            (name, lines.parse().expect("an entry ends with a number of lines"))
        })
        .collect();
    let mut findings = Vec::new();
    for (name, &lines) in over {
        let limit = if name.contains("::") { FUNCTION_LINES_MAX } else { FILE_LINES_MAX };
        match entries.get(name.as_str()) {
            None => findings.push(format!("{name}: {lines} lines, at most {limit} are allowed")),
            Some(&was) if lines > was => findings.push(format!("{name}: grew from {was} to {lines} lines")),
            Some(&was) if lines < was => {
                findings.push(format!(
                    "{name}: shrank to {lines} lines, write that into node/tests/layout.ratchet"
                ));
            }
            Some(_) => {}
        }
    }
    let gone = entries.keys().filter(|name| !over.contains_key(**name));
    findings.extend(
        gone.map(|name| format!("{name}: no exception any more, take it out of node/tests/layout.ratchet")),
    );
    findings
}

#[cfg(test)]
fn sample(file_lines: usize, function_lines: usize) -> BTreeMap<String, usize> {
    let body = "    x();\n".repeat(function_lines - 2);
    let function = format!("fn long(a: [u8; 2]) {{\n{body}}}\n");
    let rest = "\n".repeat(file_lines - function_lines);
    measure(&Tree::of_samples(&[("a.rs", &(function + &rest))]))
}

#[test]
fn a_long_file_and_a_long_function_are_found() {
    assert_eq!(sample(500, 100), BTreeMap::new());
    assert_eq!(sample(501, 101), BTreeMap::from([("a.rs".into(), 501), ("a.rs::long".into(), 101)]));
    assert_eq!(check(&sample(501, 101), "").len(), 2);
}

#[test]
fn a_generated_file_may_be_long() {
    let generated = format!("{GENERATED} by prost-build.\n{}", "\n".repeat(600));
    assert_eq!(measure(&Tree::of_samples(&[("a.rs", &generated)])), BTreeMap::new());
}

#[test]
fn the_ratchet_turns_one_way() {
    assert_eq!(check(&sample(501, 101), "# why\na.rs 501\na.rs::long 101\n"), [""; 0]);
    assert!(check(&sample(510, 100), "a.rs 501\n")[0].contains("grew"));
    assert!(check(&sample(501, 100), "a.rs 510\n")[0].contains("shrank"));
    assert!(check(&sample(400, 100), "a.rs 510\n")[0].contains("no exception"));
}
