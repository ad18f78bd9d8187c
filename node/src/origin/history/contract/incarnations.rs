//! Support for a replay from the store: pages bounded by size, and the previous incarnations of the node.

use super::bench::{ContractStore, channel, messages, query, sequences, wait};
use super::{Direction, HistoryQuery, StoreFixture};
use crate::origin::history::{HistoryCoverage, PreviousIncarnation};

pub(in crate::origin::history) fn pages_in_bytes(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    bench.append(messages(&key, bench.base_ms, 1..=9), Some(72)).expect("stored");
    let row = bench.read(query(&key)).rows[0].json.len();
    for direction in [Direction::Backwards, Direction::Forwards] {
        let request = HistoryQuery { bytes_max: 2 * row + 1, direction, ..query(&key) };
        let mut pages = vec![bench.read(request.clone())];
        while let Some(cursor) = pages[pages.len() - 1].next {
            pages.push(bench.read(HistoryQuery { cursor: Some(cursor), ..request.clone() }));
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

pub(in crate::origin::history) fn the_runs_before_are_known(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let coverage = |policies, is_all| HistoryCoverage {
        policies,
        has_changed: false,
        is_complete: is_all,
        outlasts_resume_window: false,
    };
    let key = channel("acme", "a");
    assert_eq!(wait(bench.store.begin_incarnation(1, coverage(7, true))), Ok(vec![]));
    bench.append(messages(&key, bench.base_ms, 1..=2), Some(72)).expect("stored");
    let bench = bench.reopen();
    let previous = wait(bench.store.begin_incarnation(2, coverage(8, true))).expect("begun");
    let [first] = previous[..] else { unreachable!("one run: {previous:?}") };
    assert_eq!((first.incarnation, first.coverage, first.last_ms), (1, coverage(7, true), bench.base_ms));
    assert!(first.began_ms >= bench.base_ms, "by the clock of the store");
    let now = HistoryCoverage { has_changed: true, ..coverage(9, false) };
    assert_eq!(wait(bench.store.begin_incarnation(2, now)), Ok(vec![first]), "it may say something else");
    let last_ms = first.began_ms + 60_000;
    bench.append(messages(&key, last_ms, 3..=4), Some(72)).expect("stored");
    let bench = bench.reopen();
    let previous = wait(bench.store.begin_incarnation(3, coverage(8, true))).expect("begun");
    let [second, before] = previous[..] else { unreachable!("two runs: {previous:?}") };
    let changed = HistoryCoverage { policies: HistoryCoverage::UNMATCHED_POLICIES, ..now };
    assert_eq!((second.incarnation, second.coverage, second.last_ms), (2, changed, last_ms));
    assert!(second.lasted_ms() <= 60_000);
    assert_eq!(before, first);
    assert_eq!(before.lasted_ms(), 0, "its last row is older than it is");
    let passed: Vec<u64> =
        PreviousIncarnation::with_passed_ms(&previous).map(|(_, passed_ms)| passed_ms).collect();
    assert_eq!(passed, [0, second.lasted_ms()]);
    for incarnation in 4..=40 {
        let previous = wait(bench.store.begin_incarnation(incarnation, coverage(8, true))).expect("begun");
        let expected = (1..incarnation).rev().take(16).collect::<Vec<u64>>();
        assert_eq!(previous.iter().map(|one| one.incarnation).collect::<Vec<_>>(), expected);
    }
    assert!(
        wait(
            bench
                .store
                .begin_incarnation(40, HistoryCoverage { outlasts_resume_window: true, ..coverage(8, true) })
        )
        .is_ok()
    );
    let previous = wait(bench.store.begin_incarnation(41, coverage(8, true))).expect("begun");
    assert_eq!(
        previous.iter().map(|one| one.incarnation).collect::<Vec<_>>(),
        [40],
        "it has outlasted the others"
    );
}
