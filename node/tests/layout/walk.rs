//! The pages that name functions name ones that exist.

use crate::source::{Tree, is_ident, words};

pub(crate) const PAGES: &[&str] = &["docs/architecture.md", "docs/lifetime-of-a-message.md"];

/// Every path in backticks, such as `hub::Hub::deliver`, must be found in the code.
pub(crate) fn check(tree: &Tree, page: &str) -> Vec<String> {
    let code = tree.product_code();
    let text = tree.text(page);
    let unknown = symbols(&text).filter(|symbol| !code.iter().any(|(path, code)| is_in(symbol, path, code)));
    unknown.map(|symbol| format!("{page}: `{symbol}` is not in the code")).collect()
}

fn symbols(page: &str) -> impl Iterator<Item = &str> {
    let is_symbol = |text: &&str| text.contains("::") && text.bytes().all(|b| is_ident(b) || b == b':');
    page.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).filter(is_symbol)
}

/// The last name is in the file, and the one before it is too, or is a part of the file's path.
fn is_in(symbol: &str, path: &str, code: &str) -> bool {
    let mut names = symbol.rsplit("::");
    let (Some(last), Some(before)) = (names.next(), names.next()) else { return false };
    let here = |name: &str| words(code, name).next().is_some();
    let module = |name: &str| path.split(['/', '.']).any(|part| part == name);
    (here(last) || module(last)) && (here(before) || module(before))
}

#[test]
fn a_name_that_is_gone_is_found() {
    let tree = Tree::of_samples(&[
        ("node/src/hub/mod.rs", "pub struct Hub; impl Hub { pub fn deliver(&self) {} }"),
        ("page.md", "`hub::Hub::deliver`, `edge` and `Hub::send`; then `hub::Hub::gone` and `hub::Hub`."),
    ]);
    let findings = check(&tree, "page.md");
    assert_eq!(
        findings,
        ["page.md: `Hub::send` is not in the code", "page.md: `hub::Hub::gone` is not in the code"]
    );
}
