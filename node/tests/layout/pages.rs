//! Pages under `docs/` are found by readers: each is linked from the README, or from a page that is.

use std::collections::BTreeSet;

use super::source::Tree;

const FIRST: &str = "README.md";
/// The contents of the site, whose links are the pages.
const CONTENTS: &str = "docs/site/SUMMARY.md";

pub(crate) fn check(tree: &Tree) -> Vec<String> {
    let pages: BTreeSet<&str> =
        tree.files().map(|(path, _)| path).filter(|path| path.ends_with(".md")).collect();
    let mut reached = BTreeSet::from([FIRST.to_owned()]);
    let mut waiting = vec![FIRST.to_owned()];
    while let Some(page) = waiting.pop() {
        for link in links(&tree.text(&page)) {
            let target = resolved(&page, link);
            let target = if pages.contains(&*target) { target } else { format!("{target}/README.md") };
            if pages.contains(&*target) && reached.insert(target.clone()) {
                waiting.push(target);
            }
        }
    }
    let is_lost = |page: &&str| page.starts_with("docs/") && *page != CONTENTS && !reached.contains(*page);
    let lost = pages.iter().copied().filter(is_lost);
    lost.map(|page| format!("{page}: no page leads here from {FIRST}")).collect()
}

/// Targets of Markdown links, without what follows `#`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#', ' ']).next());
    targets.filter(|target| !target.is_empty() && !target.contains("://"))
}

fn resolved(page: &str, link: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "." | "" => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[test]
fn pages_without_a_way_from_the_readme_are_found() {
    let tree = Tree::of_samples(&[
        ("README.md", "[one](docs/one.md#part) [folder](docs/more)"),
        ("docs/one.md", "[two](./deep/two.md)"),
        ("docs/deep/two.md", "[up](../one.md) [away](https://example.com/docs/lost.md)"),
        ("docs/more/README.md", ""),
        ("docs/lost.md", "[one](one.md)"),
        ("elsewhere/free.md", ""),
    ]);
    assert_eq!(check(&tree), ["docs/lost.md: no page leads here from README.md"]);
}
