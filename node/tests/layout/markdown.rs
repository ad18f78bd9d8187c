//! Pages that can be read: short lines, short sentences, short paragraphs.

use std::collections::BTreeSet;

use super::source::Tree;

/// Characters of a line; a row of a table and a line of a code block may have more.
const LINE_MAX: usize = 160;
/// Words of a sentence.
const SENTENCE_MAX: usize = 40;
/// Words of a paragraph, of an item of a list or of a cell of a table.
const PARAGRAPH_MAX: usize = 120;
/// Words of a page, as `wc -w` counts them, by the beginning of its path: a map, a summary and a decision are read in one go.
const PAGE_MAX: [(&str, usize); 4] = [
    ("docs/architecture.md", 1_500),
    ("docs/benchmarks.md", 1_200),
    ("docs/internals/", 1_000),
    ("docs/decisions/0", 700),
];
/// Ends of a sentence, whose words count.
const ENDS: [&str; 3] = [". ", "! ", "? "];
/// Ends of a part that may begin without an actor as a sentence may not.
const CLAUSES: [&str; 5] = [". ", "! ", "? ", ": ", "; "];
/// Words that stand in the place of an actor at the beginning of a sentence.
const BEGINNINGS: [&str; 7] = ["Who", "Whoever", "Whose", "Whom", "What", "Where", "Nobody"];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let pages = tree.files().filter(|(path, _)| path.ends_with(".md"));
    let findings_of_page = |(path, text)| {
        let findings = findings_of(text).map(move |finding| format!("{path}:{finding}"));
        findings.chain(too_long(path, text))
    };
    pages.flat_map(findings_of_page).collect()
}

fn too_long(path: &str, text: &str) -> Option<String> {
    let (_, most) = PAGE_MAX.iter().find(|(beginning, _)| path.starts_with(beginning))?;
    let words = text.split_whitespace().count();
    (words > *most).then(|| format!("{path}: a page of {words} words, at most {most} are allowed"))
}

fn findings_of(text: &str) -> impl Iterator<Item = String> {
    let mut findings = long_lines(text);
    for (line, paragraph) in paragraphs(text) {
        let words = paragraph.split_whitespace().count();
        if words > PARAGRAPH_MAX {
            findings
                .push(format!("{line}: a paragraph of {words} words, at most {PARAGRAPH_MAX} are allowed"));
        }
        let parts = sentences(&paragraph, &ENDS).chain(sentences(&paragraph, &CLAUSES));
        let faults: BTreeSet<String> = parts.filter_map(fault_of).collect();
        findings.extend(faults.iter().map(|fault| format!("{line}: {fault}")));
    }
    findings.into_iter()
}

fn long_lines(text: &str) -> Vec<String> {
    let prose = lines_of_prose(text).filter(|(_, line)| !line.trim_start().starts_with('|'));
    let long = prose.map(|(at, line)| (at, line.chars().count())).filter(|(_, length)| *length > LINE_MAX);
    long.map(|(at, length)| format!("{at}: a line of {length} characters, at most {LINE_MAX} are allowed"))
        .collect()
}

fn fault_of(sentence: &str) -> Option<String> {
    let start: String = sentence.chars().take(50).collect();
    let first = sentence.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
    if BEGINNINGS.contains(&first) && !sentence.ends_with('?') {
        return Some(format!("a sentence begins with {first}, name the actor: {start}"));
    }
    let words = sentence.split_whitespace().count();
    (words > SENTENCE_MAX)
        .then(|| format!("a sentence of {words} words, at most {SENTENCE_MAX} are allowed: {start}"))
}

/// Lines outside code blocks, numbered from 1.
fn lines_of_prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        (!is_code && !is_fence).then_some((at + 1, line))
    })
}

/// Paragraphs, items of lists and cells of tables, each with its first line; code in backticks and targets of links count as one word.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let mut paragraphs: Vec<(usize, String)> = Vec::new();
    let mut last = 0;
    for (at, line) in lines_of_prose(text) {
        let line_text = line.trim();
        if let Some(row) = line_text.strip_prefix('|') {
            paragraphs.extend(row.split('|').map(|cell| (at, plain(cell))));
            continue;
        }
        if line_text.is_empty() || line_text.starts_with('#') {
            continue;
        }
        let (item, is_item) = without_marker(line_text);
        match paragraphs.last_mut() {
            Some((_, paragraph)) if last + 1 == at && !is_item => {
                paragraph.push(' ');
                paragraph.push_str(&plain(item));
            }
            _ => paragraphs.push((at, plain(item))),
        }
        last = at;
    }
    paragraphs
}

/// The text of an item of a list without `-`, `*`, `>` or `1.`.
fn without_marker(line: &str) -> (&str, bool) {
    let bullet = ["- ", "* ", "> "].iter().find_map(|marker| line.strip_prefix(marker));
    let number = line.split_once(". ").filter(|(digits, _)| digits.bytes().all(|b| b.is_ascii_digit()));
    match (bullet, number) {
        (Some(item), _) | (None, Some((_, item))) => (item, true),
        (None, None) => (line, false),
    }
}

/// Without the targets of links, and with `x` for code.
fn plain(text: &str) -> String {
    let prose: String =
        text.split('`').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "x" }).collect();
    let mut parts = prose.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |plain, part| plain + part.split_once(')').map_or(part, |(_, rest)| rest))
}

/// Parts of a paragraph that end with one of these.
fn sentences<'t>(paragraph: &'t str, ends: &[&str]) -> impl Iterator<Item = &'t str> {
    let mut rest = paragraph.trim();
    std::iter::from_fn(move || {
        let end = ends.iter().filter_map(|end| rest.find(end)).min().map_or(rest.len(), |at| at + 1);
        let (sentence, after) = rest.split_at(end);
        rest = after.trim_start();
        (!sentence.is_empty()).then_some(sentence)
    })
}

#[test]
fn long_lines_sentences_and_paragraphs_are_found() {
    let line = "a".repeat(LINE_MAX + 1);
    let sentence = vec!["a"; SENTENCE_MAX + 1].join("\n");
    let paragraph = format!("- {}", vec!["a. b."; PARAGRAPH_MAX / 2 + 1].join("\n"));
    for (text, expected) in [(&line, "line of"), (&sentence, "sentence of"), (&paragraph, "paragraph of")] {
        let findings: Vec<String> = findings_of(text).collect();
        assert!(matches!(&findings[..], [one] if one.contains(expected)), "{findings:?}");
    }
    for fine in [
        format!("| {line} |"),
        format!("```\n{line}\n```"),
        sentence.replacen('\n', ".\n", 1),
        paragraph.replacen('\n', "\n\n", 1),
        format!("[{}](b)", vec!["a"; SENTENCE_MAX].join("\n")),
    ] {
        assert_eq!(findings_of(&fine).collect::<Vec<_>>(), [""; 0], "{fine}");
    }
}

#[test]
fn sentences_without_an_actor_are_found() {
    for (text, count) in [
        ("Who comes back is told.", 1),
        ("It is so: What was lost is told. Nobody\nis.", 2),
        ("| a | Where it was |", 1),
        ("What is lost?", 0),
        ("Whole batches. A node, who is it?", 0),
    ] {
        assert_eq!(findings_of(text).count(), count, "{text}");
    }
}

#[test]
fn long_pages_are_found() {
    let words = |count| vec!["a."; count].join("\n\n");
    let tree = Tree::of_samples(&[
        ("docs/internals/a.md", &words(1_001)),
        ("docs/internals/b.md", &words(1_000)),
        ("docs/guides/a.md", &words(2_000)),
    ]);
    assert_eq!(check(&tree), ["docs/internals/a.md: a page of 1001 words, at most 1000 are allowed"]);
}
