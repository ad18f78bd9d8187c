//! Residue: files and lines that work leaves behind and a tree does not need.

use crate::source::{Tree, code_only, is_ident, line_of, words};

const ENDINGS: &[&str] = &[".bak", ".orig", ".rej", ".log", ".tmp", ".out", ".swp"];
/// The contents of the site, as mdBook calls them.
const CONTENTS: &str = "docs/site/SUMMARY.md";
const PAPERS: &[&str] = &["PLAN", "NOTES", "AUDIT", "SUMMARY", "STATUS", "REPORT"];
// Split, so that this file is clean by its own rules.
const OPEN_ENDS: &[&str] =
    &[concat!("to", "do!"), concat!("unimple", "mented!"), concat!("db", "g!"), concat!("#[ig", "nore")];
const MARKS: &[&str] = &[concat!("FIX", "ME"), concat!("XX", "X"), concat!("TO", "DO")];
/// Top folders of one machine or person; a path that begins with one of them is of no use to others.
const MACHINE_FOLDERS: &[&str] = &["home", "Users", "root", "work"];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let mut findings: Vec<String> = tree
        .files()
        .filter(|(path, _)| is_residue(path))
        .map(|(path, _)| format!("{path}: residue"))
        .collect();
    for (path, text) in tree.files().filter(|(path, _)| !path.ends_with(".lock")) {
        let mut add = |at: usize, what: &str| findings.push(format!("{path}:{}: {what}", line_of(text, at)));
        machine_paths(text).for_each(|at| add(at, "path of one machine"));
        MARKS.iter().flat_map(|mark| words(text, mark)).for_each(|at| add(at, "left open"));
        if path.ends_with(".rs") {
            let code = code_only(text);
            OPEN_ENDS.iter().flat_map(|open| word_starts(&code, open)).for_each(|at| add(at, "left open"));
            commented_out(text, &code).for_each(|at| add(at, "commented-out code"));
        }
    }
    findings
}

fn is_residue(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let paper =
        name.ends_with(".md") && path != CONTENTS && PAPERS.iter().any(|paper| name.starts_with(paper));
    paper || name.ends_with('~') || ENDINGS.iter().any(|ending| name.ends_with(ending))
}

fn word_starts<'t>(text: &'t str, start: &'t str) -> impl Iterator<Item = usize> + 't {
    let bytes = text.as_bytes();
    text.match_indices(start).map(|(at, _)| at).filter(|&at| at == 0 || !is_ident(bytes[at - 1]))
}

fn machine_paths(text: &str) -> impl Iterator<Item = usize> {
    let bytes = text.as_bytes();
    let begins = |at: usize| at == 0 || !(is_ident(bytes[at - 1]) || b"./})".contains(&bytes[at - 1]));
    text.match_indices('/').map(|(at, _)| at).filter(move |&at| {
        let folder =
            |name: &&str| text[at + 1..].strip_prefix(*name).is_some_and(|rest| rest.starts_with('/'));
        begins(at) && MACHINE_FOLDERS.iter().any(folder)
    })
}

/// Offsets of `//` comments that read like statements; doc comments may hold examples.
fn commented_out<'t>(text: &'t str, code: &'t str) -> impl Iterator<Item = usize> + 't {
    let mut at = 0;
    let lines = text.split_inclusive('\n').map(move |line| {
        at += line.len();
        (at - line.len(), line)
    });
    lines.filter_map(|(at, line)| {
        let comment = line.trim_start().strip_prefix("//")?;
        let inside_literal = code[at..at + line.len()].trim().is_empty() == line.trim().is_empty();
        let prose = comment.starts_with(['/', '!']) || inside_literal;
        (!prose && is_statement(comment.trim())).then_some(at)
    })
}

fn is_statement(comment: &str) -> bool {
    let coded = comment.contains(['(', '=', '[']) || comment.contains("::");
    (comment.ends_with(';') && (coded || comment.starts_with("use ") || comment.starts_with("return")))
        || (comment.ends_with('{') && comment.len() > 1)
        || ["}", "};", "});", "})", "},"].contains(&comment)
}

#[cfg(test)]
fn findings_of(path: &str, text: &str) -> usize {
    check(&Tree::of_samples(&[(path, text)])).len()
}

#[test]
fn left_over_files_are_found() {
    for path in ["a.bak", "b/c.orig", "x.rej", "run.log", "y.tmp", "docs/PLAN.md", "REPORT-2.md", "src/a.rs~"]
    {
        assert_eq!(findings_of(path, ""), 1, "{path}");
    }
    for path in ["src/log.rs", "docs/planning.md", "src/tmp/mod.rs", "docs/notes.svg"] {
        assert_eq!(findings_of(path, ""), 0, "{path}");
    }
}

#[test]
fn open_ends_are_found_in_code_and_marks_in_all_files() {
    let [macros @ .., attribute] = OPEN_ENDS else { panic!("there are some") };
    for name in macros {
        assert_eq!(findings_of("a.rs", &format!("fn f() {{ {name}(\"x\") }}")), 1, "{name}");
        assert_eq!(findings_of("a.rs", &format!("const A: &str = \"{name}\";")), 0, "{name}");
    }
    assert_eq!(findings_of("a.rs", &format!("#[test]\n{attribute}]\nfn f() {{}}")), 1);
    for mark in MARKS {
        assert_eq!(findings_of("a.rs", &format!("// {mark}: later")), 1, "{mark}");
        assert_eq!(findings_of("a.md", &format!("{mark} later")), 1, "{mark}");
    }
}

#[test]
fn paths_of_one_machine_are_found() {
    for folder in MACHINE_FOLDERS {
        assert_eq!(findings_of("a.md", &format!("see /{folder}/x/y")), 1);
        assert_eq!(findings_of("a.rs", &format!("const A: &str = \"/{folder}/x\";")), 1);
        assert_eq!(findings_of("a.md", &format!("see docs/{folder}/x and https://x.org/{folder}/y")), 0);
    }
}

#[test]
fn commented_out_code_is_found_and_prose_is_not() {
    for code in ["    // let a = 1;", "// hub.deliver(x);", "// if a == b {", "// }", "// use crate::a;"] {
        assert_eq!(findings_of("a.rs", &format!("{code}\n")), 1, "{code}");
    }
    for prose in [
        "// The first match wins; see above",
        "/// let a = f();",
        "// Held back (see below).",
        "let a = 1; // b;",
    ] {
        assert_eq!(findings_of("a.rs", &format!("{prose}\n")), 0, "{prose}");
    }
}
