/// The known name that was probably meant.
pub(super) fn nearest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let given = given.replace('-', "_").to_ascii_lowercase();
    known
        .map(|name| (edits(&given, &name.to_ascii_lowercase()), name))
        .min_by_key(|(edits, _)| *edits)
        .filter(|(edits, name)| *edits <= name.len().div_ceil(4))
        .map(|(_, name)| name)
}

/// Insertions, deletions and replacements that lead from one to the other.
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_meant() {
        let known = ["listen", "admin_listen", "data_dir", "store"];
        for (given, meant) in [
            ("lisen", Some("listen")),
            ("data-dir", Some("data_dir")),
            ("datadir", Some("data_dir")),
            ("x", None),
        ] {
            assert_eq!(nearest(given, known.into_iter()), meant, "{given}");
        }
    }
}
