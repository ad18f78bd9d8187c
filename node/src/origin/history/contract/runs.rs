//! What a replay from the store needs: pages by their size, and which run of the node wrote before.

use super::bench::{Bench, channel, messages, query, sequences, wait};
use super::{Direction, HistoryQuery, Place};
use crate::origin::history::FormerRun;

pub(in crate::origin::history) fn pages_in_bytes(place: &dyn Place) {
    let bench = Bench::new(place);
    let key = channel("acme", "a");
    bench.append(messages(&key, bench.base_ms, 1..=9), Some(72)).expect("stored");
    let row = bench.read(query(&key)).rows[0].json.len();
    for direction in [Direction::Backwards, Direction::Forwards] {
        let asked = HistoryQuery { bytes_max: 2 * row + 1, direction, ..query(&key) };
        let mut pages = vec![bench.read(asked.clone())];
        while let Some(cursor) = pages[pages.len() - 1].next {
            pages.push(bench.read(HistoryQuery { cursor: Some(cursor), ..asked.clone() }));
        }
        assert!(
            pages.iter().all(|page| page.rows.len() == 3),
            "each ends with the row that reaches the bound"
        );
        let mut seen: Vec<u64> = pages.iter().flat_map(sequences).collect();
        seen.sort_unstable();
        assert_eq!(seen, (1..=9).collect::<Vec<u64>>());
    }
    let least = bench.read(HistoryQuery { bytes_max: 0, ..query(&key) });
    assert_eq!(least.rows.len(), 1, "at least one, however small the bound");
}

pub(in crate::origin::history) fn the_run_before_is_known(place: &dyn Place) {
    let bench = Bench::new(place);
    assert_eq!(wait(bench.store.begin(1, 7)), Ok(None));
    bench.append(messages(&channel("acme", "a"), bench.base_ms, 1..=2), Some(72)).expect("stored");
    let bench = bench.reopen();
    let first = FormerRun { incarnation: 1, policies: 7, last_ms: bench.base_ms };
    assert_eq!(wait(bench.store.begin(2, 8)), Ok(Some(first)));
    assert!(wait(bench.store.begin(2, 9)).is_ok(), "it may change its policies");
    let bench = bench.reopen();
    assert_eq!(wait(bench.store.begin(3, 8)), Ok(Some(FormerRun { incarnation: 2, policies: 9, ..first })));
}
