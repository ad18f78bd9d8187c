//! Doc comments begin with what the item is: a noun, or a verb in the third person.

use super::source::Tree;

/// Beginnings of fragments, which say something of an item that they do not name.
const FRAGMENTS: [&str; 31] = [
    "As", "At", "Behind", "By", "For", "From", "How", "In", "It", "Its", "Nobody", "Of", "On", "Since", "So",
    "Somebody", "That", "There", "These", "They", "Those", "To", "Until", "What", "Where", "Which", "When",
    "Who", "Whoever", "Whose", "Why",
];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let findings = tree.rust_files().flat_map(|(path, text)| {
        let fragments = beginnings(text).filter(|(_, first)| FRAGMENTS.contains(first));
        fragments.map(move |(line, first)| {
            format!("{path}:{line}: a doc comment begins with {first}: say what the item is")
        })
    });
    findings.collect()
}

/// The first word of each doc comment, with its line.
fn beginnings(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_inside = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let line = line.trim_start();
        let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        let begins = !std::mem::replace(&mut is_inside, comment.is_some());
        let word = comment.filter(|_| begins)?.split_whitespace().next()?;
        Some((at + 1, word.trim_end_matches([',', ':', '.'])))
    })
}

#[test]
fn fragments_at_the_beginning_are_found() {
    let text =
        "/// What is lost.\n/// Of all.\nfn a() {}\n    //! Those\n/// Offsets\n// Who\n/// The node\n";
    let findings = check(&Tree::of_samples(&[("a.rs", text), ("a.md", "/// What")]));
    assert_eq!(findings.len(), 2, "{findings:?}");
    assert!(findings[0].starts_with("a.rs:1: ") && findings[1].starts_with("a.rs:4: "), "{findings:?}");
}
