//! Names of tests: the case and the expectation, with the actor named.

use super::source::{self, Tree};

const LENGTH_MAX: usize = 60;
/// Words that stand in the place of an actor.
const BEGINNINGS: [&str; 15] = [
    "who", "what", "where", "nobody", "whoever", "whose", "whom", "so", "it", "its", "of", "at", "by",
    "from", "that",
];

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    tree.rust_files().flat_map(|(path, text)| findings_of(path, &source::code_only(text))).collect()
}

fn findings_of(path: &str, code: &str) -> Vec<String> {
    let tests = code.match_indices("test").filter_map(|(at, _)| name_after(code, at));
    let findings = tests.filter_map(|name| Some(format!("{path}: {name} {}", fault_of(name)?)));
    findings.collect()
}

/// The name of the function behind an attribute that ends with `test` here; none: it is no such attribute.
fn name_after(code: &str, at: usize) -> Option<&str> {
    let before = code[..at].trim_end();
    if !before.ends_with("#[") && !before.ends_with("#[tokio::") {
        return None;
    }
    let (_, rest) = code[at..].split_once("fn ")?;
    rest.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()
}

fn fault_of(name: &str) -> Option<String> {
    let first = name.split('_').next().unwrap_or_default();
    if BEGINNINGS.contains(&first) {
        return Some(format!("begins with {first}: name the actor"));
    }
    (name.len() > LENGTH_MAX)
        .then(|| format!("has {} characters, at most {LENGTH_MAX} are allowed", name.len()))
}

#[test]
fn names_without_an_actor_and_long_ones_are_found() {
    let long = "a".repeat(LENGTH_MAX + 1);
    for attribute in ["#[test]", "#[tokio::test]", "#[tokio::test(flavor = \"multi_thread\")]"] {
        for name in ["who_comes_back", "nobody", &*long] {
            let code = format!("{attribute}\n#[should_panic]\nasync fn {name}() {{}}\nfn who() {{}}");
            assert_eq!(findings_of("a.rs", &code).len(), 1, "{code}");
        }
        let good = format!("{attribute}\nfn whole_batch_is_published() {{}}\nfn who() {{}}");
        assert_eq!(findings_of("a.rs", &good), [""; 0]);
    }
}
