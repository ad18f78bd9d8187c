/// The known name that was probably meant: the one with the fewest edits, else one that the given name begins with.
pub(super) fn nearest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let known: Vec<_> = known.collect();
    nearest_spelling(given, known.iter().copied()).or_else(|| {
        let given = plain(given);
        known
            .into_iter()
            .filter(|name| name.len() > 2 && given.starts_with(&name.to_ascii_lowercase()))
            .max_by_key(|name| name.len())
    })
}

/// The known name that differs in a few letters only, at most one of four.
pub(super) fn nearest_spelling<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let given = plain(given);
    known
        .map(|name| (edits(&given, &name.to_ascii_lowercase()), name))
        .min_by_key(|(edits, _)| *edits)
        .filter(|(edits, name)| *edits <= name.len().div_ceil(4))
        .map(|(_, name)| name)
}

fn plain(given: &str) -> String {
    given.trim().replace('-', "_").to_ascii_lowercase()
}

/// Number of insertions, deletions, replacements and swaps of neighbours between two texts.
fn edits(from: &str, to: &str) -> usize {
    let (from, to) = (from.as_bytes(), to.as_bytes());
    let mut before: Vec<usize> = Vec::new();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for i in 0..from.len() {
        let mut next = vec![i + 1];
        for j in 0..to.len() {
            let replaced = row[j] + usize::from(from[i] != to[j]);
            let mut least = replaced.min(row[j + 1] + 1).min(next[j] + 1);
            if i > 0 && j > 0 && from[i] == to[j - 1] && from[i - 1] == to[j] {
                least = least.min(before[j - 1] + 1);
            }
            next.push(least);
        }
        before = std::mem::replace(&mut row, next);
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_meant() {
        let known = ["listen", "admin_listen", "data_dir", "store", "log", "info", "warn"];
        for (given, meant) in [
            ("lisen", Some("listen")),
            ("data-dir", Some("data_dir")),
            ("datadir", Some("data_dir")),
            ("inof", Some("info")),
            ("warning", Some("warn")),
            ("listen_port", Some("listen")),
            ("x", None),
            ("version", None),
        ] {
            assert_eq!(nearest(given, known.into_iter()), meant, "{given}");
        }
        assert_eq!(nearest_spelling("warning", known.into_iter()), None);
    }

    #[test]
    fn edit_distance_counts_each_edit_once() {
        for (from, to, expected) in
            [("", "ab", 2), ("ab", "", 2), ("ab", "ba", 1), ("abc", "adc", 1), ("abcd", "bacd", 1)]
        {
            assert_eq!(edits(from, to), expected, "{from} {to}");
        }
    }
}
