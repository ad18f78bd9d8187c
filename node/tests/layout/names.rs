//! Names that a stranger can read: one word for each idea, and one type for each name.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{self, Tree, is_ident, line_of, words};

/// The page whose tables say which word is used, and in their last column, in backticks, which parts of names are refused for it.
const PAGE: &str = "docs/glossary.md";
/// Names of types that many modules may have.
const SHARED: [&str; 4] = ["Error", "State", "Options", "Config"];
/// Names of libraries and of settings, which are not ours to choose or are in use.
const GIVEN: [&str; 6] = [
    "dead_node_grace_period",
    "floor",
    "floor_char_boundary",
    "heartbeat_grace_ms",
    "marked_for_deletion_grace_period",
    "presence_grace_ms",
];
const KEYWORDS: [&str; 5] = ["struct", "enum", "trait", "type", "union"];

/// Refused part of a name → the word to use.
pub(crate) struct Glossary(BTreeMap<String, String>);

impl Glossary {
    pub(crate) fn parse(page: &str) -> Self {
        let rows = page.lines().filter(|line| line.starts_with('|'));
        let mut refused = BTreeMap::new();
        for row in rows {
            let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
            let [word, .., old] = cells[..] else { continue };
            refused.extend(old.split('`').skip(1).step_by(2).map(|old| (old.to_owned(), word.to_owned())));
        }
        assert!(!refused.is_empty(), "{PAGE} refuses no name");
        Self(refused)
    }

    pub(crate) fn of(tree: &Tree) -> Self {
        Self::parse(&tree.text(PAGE))
    }

    /// Names of items that hold a refused part, in all Rust code.
    pub(crate) fn check(&self, tree: &Tree) -> Vec<String> {
        let mut findings = Vec::new();
        for (path, text) in tree.rust_files() {
            let code = source::code_only(text);
            let mut seen = BTreeSet::new();
            for (at, name) in identifiers(&code) {
                let Some((part, word)) = self.fault_of(name) else { continue };
                if seen.insert(name) {
                    let line = line_of(&code, at);
                    findings.push(format!(
                        "{path}:{line}: `{name}` has \"{part}\", the glossary says \"{word}\""
                    ));
                }
            }
        }
        findings
    }

    /// A refused part is one or several whole words of the name.
    fn fault_of(&self, name: &str) -> Option<(&str, &str)> {
        if GIVEN.contains(&name) {
            return None;
        }
        let name = format!("_{}_", snake(name));
        let fault = self.0.iter().find(|(part, _)| name.contains(&format!("_{part}_")));
        fault.map(|(part, word)| (part.as_str(), word.as_str()))
    }
}

fn identifiers(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    code.split(|letter: char| !letter.is_ascii() || !is_ident(letter as u8)).filter_map(move |name| {
        let start = at + code[at..].find(name)?;
        at = start + name.len();
        name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_')
            .then_some((start, name))
    })
}

/// `peer_stream` for `PeerStream`, `PEER_STREAM` and `peer_stream`.
fn snake(name: &str) -> String {
    let letters: Vec<char> = name.chars().collect();
    let mut snake = String::new();
    for (at, letter) in letters.iter().enumerate() {
        let is_low = |letter: &char| letter.is_ascii_lowercase() || letter.is_ascii_digit();
        let before = at.checked_sub(1).map(|at| &letters[at]);
        let ends_acronym =
            before.is_some_and(char::is_ascii_uppercase) && letters.get(at + 1).is_some_and(is_low);
        if letter.is_ascii_uppercase() && (before.is_some_and(is_low) || ends_acronym) {
            snake.push('_');
        }
        snake.push(letter.to_ascii_lowercase());
    }
    snake
}

/// Types of the node that share a name with another one, or whose name is a participle alone, which says nothing of what the type is.
pub(crate) fn check_types(tree: &Tree) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (path, text) in tree.rust_files().filter(|(path, _)| path.starts_with("node/src/")) {
        let code = source::code_only(text);
        for (at, name) in types(&code) {
            places.entry(name.to_owned()).or_default().push(format!("{path}:{}", line_of(&code, at)));
        }
    }
    let fault_of = |name: &str, at: &[String]| match at {
        [_, _, ..] if !SHARED.contains(&name) => Some("is the name of several types"),
        _ if is_participle(name) => Some("is a participle: what is it?"),
        _ => None,
    };
    let findings = places.into_iter().filter_map(|(name, at)| {
        let fault = fault_of(&name, &at)?;
        Some(format!("`{name}` {fault}: {}", at.join(", ")))
    });
    findings.collect()
}

/// One word that ends as a participle does. HTTP has given one of them a meaning.
fn is_participle(name: &str) -> bool {
    let is_one_word = name.bytes().skip(1).all(|byte| byte.is_ascii_lowercase());
    is_one_word && name.ends_with("ed") && name != "Unauthorized"
}

/// Definitions of types, but not the associated types of a trait or its implementations, which are indented `type`s.
fn types(code: &str) -> impl Iterator<Item = (usize, &str)> {
    KEYWORDS.iter().flat_map(move |keyword| {
        words(code, keyword).filter_map(move |at| {
            let rest = code[at + keyword.len()..].strip_prefix(' ')?;
            let name = rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()?;
            let line = &code[code[..at].rfind('\n').map_or(0, |end| end + 1)..at];
            let is_associated = *keyword == "type" && line.starts_with(' ');
            (!name.is_empty() && !is_associated).then_some((at, name))
        })
    })
}

#[test]
fn names_that_the_glossary_refuses_are_found() {
    let page = "| word | meaning | not |\n|---|---|---|\n| peer stream | a stream | `lane`, an idle lane |\n| local offset | - | `spot` |";
    let glossary = Glossary::parse(page);
    let tree = Tree::of_samples(&[
        (
            "a.rs",
            "struct PeerLane; struct TCPLane; fn lane_of(spot: u8) {} // lane\nconst S: &str = \"spot\"; fn airplanes() {}",
        ),
        ("b.md", "lane"),
    ]);
    let findings = glossary.check(&tree);
    assert_eq!(
        findings,
        [
            "a.rs:1: `PeerLane` has \"lane\", the glossary says \"peer stream\"",
            "a.rs:1: `TCPLane` has \"lane\", the glossary says \"peer stream\"",
            "a.rs:1: `lane_of` has \"lane\", the glossary says \"peer stream\"",
            "a.rs:1: `spot` has \"spot\", the glossary says \"local offset\"",
        ]
    );
}

#[test]
fn types_of_one_name_and_participles_are_found() {
    let tree = Tree::of_samples(&[
        (
            "node/src/a.rs",
            "struct Answer;\nenum Error {}\nimpl X for Answer {\n    type Out = ();\n}\ntype Joined = u8;",
        ),
        (
            "node/src/b.rs",
            "pub trait Answer {\n    type Out;\n}\nstruct Error;\nstruct Other; // struct Joined",
        ),
        ("benches/src/c.rs", "struct Other;"),
    ]);
    assert_eq!(
        check_types(&tree),
        [
            "`Answer` is the name of several types: node/src/a.rs:1, node/src/b.rs:1",
            "`Joined` is a participle: what is it?: node/src/a.rs:6",
        ]
    );
}
