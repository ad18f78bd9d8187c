//! The shape of the tree: who may use whom, how long a file may grow, and what must not be there at all.
//!
//! Every rule is a function from text to findings, tried on a bad sample in its own file and on the tree here.

mod comments;
mod imports;
mod markdown;
mod metrics;
mod names;
mod pages;
mod places;
mod residue;
mod sizes;
mod source;
mod test_names;
mod walk;
mod workspace;

use source::Tree;

fn assert_none(findings: &[String]) {
    assert!(findings.is_empty(), "\n{}\n", findings.join("\n"));
}

#[test]
fn modules_use_only_what_the_architecture_page_allows() {
    let tree = Tree::of_workspace();
    let rules = imports::Rules::parse(&tree.text("docs/architecture.md"));
    assert_none(&imports::check(&tree, &rules));
}

#[test]
fn files_and_functions_keep_their_size() {
    let tree = Tree::of_workspace();
    assert_none(&sizes::check(&sizes::measure(&tree), &tree.text("node/tests/layout.ratchet")));
}

#[test]
fn names_of_tests_say_case_and_expectation() {
    assert_none(&test_names::check(&Tree::of_workspace()));
}

#[test]
fn names_are_the_words_of_the_glossary() {
    let tree = Tree::of_workspace();
    assert_none(&names::Glossary::of(&tree).check(&tree));
}

#[test]
fn types_of_the_node_have_names_of_their_own() {
    assert_none(&names::check_types(&Tree::of_workspace()));
}

#[test]
fn doc_comments_say_what_the_item_is() {
    assert_none(&comments::check(&Tree::of_workspace()));
}

#[test]
fn pages_have_short_lines_sentences_and_paragraphs() {
    assert_none(&markdown::check(&Tree::of_workspace()));
}

#[test]
fn each_page_is_reached_from_the_readme() {
    assert_none(&pages::check(&Tree::of_workspace()));
}

#[test]
fn confined_paths_are_named_only_in_their_places() {
    assert_none(&places::check(&Tree::of_workspace()));
}

#[test]
fn tests_wait_for_states() {
    assert_none(&places::check_sleeps(&Tree::of_workspace()));
}

#[test]
fn every_metric_has_help_and_a_row() {
    assert_none(&metrics::check(&Tree::of_workspace()));
}

#[test]
fn nothing_is_left_lying_about() {
    assert_none(&residue::check(&Tree::of_workspace()));
}

#[test]
fn crates_depend_in_one_direction() {
    assert_none(&workspace::check(&Tree::of_workspace()));
}

#[test]
fn the_pages_name_what_exists() {
    let tree = Tree::of_workspace();
    let findings: Vec<String> = walk::PAGES.iter().flat_map(|page| walk::check(&tree, page)).collect();
    assert_none(&findings);
}
