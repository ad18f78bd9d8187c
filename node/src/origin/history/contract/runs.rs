//! What a replay from the store needs: pages by their size, and which runs of the node wrote before.

use super::bench::{Bench, channel, messages, query, sequences, wait};
use super::{Direction, HistoryQuery, Place};
use crate::origin::history::{FormerRun, Kept};

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

pub(in crate::origin::history) fn the_runs_before_are_known(place: &dyn Place) {
    let bench = Bench::new(place);
    let said = |policies, is_all| Kept { policies, has_changed: false, is_all, outlasts: false };
    let key = channel("acme", "a");
    assert_eq!(wait(bench.store.begin(1, said(7, true))), Ok(vec![]));
    bench.append(messages(&key, bench.base_ms, 1..=2), Some(72)).expect("stored");
    let bench = bench.reopen();
    let former = wait(bench.store.begin(2, said(8, true))).expect("begun");
    let [first] = former[..] else { unreachable!("one run: {former:?}") };
    assert_eq!((first.incarnation, first.kept, first.last_ms), (1, said(7, true), bench.base_ms));
    assert!(first.began_ms >= bench.base_ms, "by the clock of the store");
    let now = Kept { has_changed: true, ..said(9, false) };
    assert_eq!(wait(bench.store.begin(2, now)), Ok(vec![first]), "it may say something else");
    let last_ms = first.began_ms + 60_000;
    bench.append(messages(&key, last_ms, 3..=4), Some(72)).expect("stored");
    let bench = bench.reopen();
    let former = wait(bench.store.begin(3, said(8, true))).expect("begun");
    let [second, before] = former[..] else { unreachable!("two runs: {former:?}") };
    let changed = Kept { policies: Kept::UNLIKE_ALL, ..now };
    assert_eq!((second.incarnation, second.kept, second.last_ms), (2, changed, last_ms));
    assert!(second.lasted_ms() <= 60_000);
    assert_eq!(before, first);
    assert_eq!(before.lasted_ms(), 0, "its last row is older than it is");
    let passed: Vec<u64> = FormerRun::with_passed_ms(&former).map(|(_, passed_ms)| passed_ms).collect();
    assert_eq!(passed, [0, second.lasted_ms()]);
    for incarnation in 4..=40 {
        let former = wait(bench.store.begin(incarnation, said(8, true))).expect("begun");
        let expected = (1..incarnation).rev().take(16).collect::<Vec<u64>>();
        assert_eq!(former.iter().map(|run| run.incarnation).collect::<Vec<_>>(), expected);
    }
    assert!(wait(bench.store.begin(40, Kept { outlasts: true, ..said(8, true) })).is_ok());
    let former = wait(bench.store.begin(41, said(8, true))).expect("begun");
    assert_eq!(
        former.iter().map(|run| run.incarnation).collect::<Vec<_>>(),
        [40],
        "it has outlasted the others"
    );
}
