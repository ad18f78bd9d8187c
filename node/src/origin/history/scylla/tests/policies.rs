//! What runs of several nodes say of which channels keep history, and for how long it is there.

use super::*;
use crate::origin::history::scylla::policies::say_again;

/// What is read, with the seconds that are left of it, in the order of runs.
fn told(place: &Keyspace, store: &Scylla) -> Vec<(u64, u64, u64)> {
    let mut kept = wait(store.lately_kept()).expect("read");
    kept.sort_unstable();
    let keyspace = &place.connection.keyspace;
    let asked = format!("SELECT incarnation, policies, TTL(is_over) FROM {keyspace}.policies");
    let found = runtime().block_on(store.shared.database().session.query_unpaged(asked, ()));
    let found = found.expect("read").into_rows_result().expect("rows");
    let rows = found.rows::<(i64, i64, i32)>().expect("the columns are what they are");
    let row = |(run, policies, left): (i64, i64, i32)| {
        let left_s = u64::try_from(left).expect("it is there");
        (values::unordered(run), values::unordered(policies), left_s)
    };
    let mut rows: Vec<_> = rows.map(|found| row(found.expect("a row"))).collect();
    rows.sort_unstable();
    assert_eq!(rows.iter().map(|(run, policies, _)| (*run, *policies)).collect::<Vec<_>>(), kept);
    rows
}

/// Which of them are said to be over: of these too the time is left in which somebody may come back.
fn over(told: &[(u64, u64, u64)]) -> Vec<bool> {
    let keeps_s = 2 * Limits::default().resume_window_ms / 1_000;
    assert!(told.iter().all(|(_, _, left_s)| *left_s > keeps_s), "{told:?}");
    told.iter().map(|(_, _, left_s)| *left_s < keeps_s + 100).collect()
}

fn said(policies: u64) -> Kept {
    Kept { policies, has_changed: false, is_all: true, outlasts: false }
}

#[test]
fn policies_of_each_incarnation_visible_to_all_while_they_count() {
    let Some(place) = Keyspace::new() else { return };
    let clock = Clock::system();
    let open =
        |node: &str| place.open_with(ScyllaOptions { node_id: node.into(), ..Keyspace::options() }, &clock);
    let runs = |told: &[(u64, u64, u64)]| told.iter().map(|(run, of, _)| (*run, *of)).collect::<Vec<_>>();
    let [one, other] = ["n1", "n2"].map(open);
    assert_eq!((told(&place, &one), one.told_policies()), (vec![], None));
    wait(one.begin(1, said(7))).expect("begun");
    wait(other.begin(u64::MAX, said(7))).expect("begun");
    let seen = told(&place, &other);
    assert_eq!((runs(&seen), over(&seen)), (vec![(1, 7), (u64::MAX, 7)], vec![false, false]));
    assert_eq!((one.told_policies(), other.told_policies()), (Some(7), Some(7)));

    // It changes, and something else is said of it.
    wait(one.begin(1, Kept { has_changed: true, ..said(u64::MAX - 1) })).expect("said");
    wait(one.begin(1, Kept { has_changed: true, outlasts: true, ..said(u64::MAX - 1) })).expect("said");
    let seen = told(&place, &other);
    assert_eq!(runs(&seen), [(1, 7), (1, u64::MAX - 1), (u64::MAX, 7)]);
    assert_eq!(over(&seen), [true, false, false]);
    assert_eq!(one.told_policies(), Some(u64::MAX - 1));

    // It changes back.
    wait(one.begin(1, Kept { has_changed: true, ..said(7) })).expect("said");
    assert_eq!(over(&told(&place, &other)), [false, true, false]);

    // One is killed, and one is stopped.
    let one_again = open("n1");
    wait(one_again.begin(2, said(8))).expect("begun");
    other.shutdown();
    let seen = told(&place, &one_again);
    assert_eq!(runs(&seen), [(1, 7), (1, u64::MAX - 1), (2, 8), (u64::MAX, 7)]);
    assert_eq!(over(&seen), [true, true, false, true]);
    assert_eq!(wait(other.lately_kept()), Err(StoreError::ShutDown));
}

#[test]
fn policies_of_incarnation_are_announced_again_before_expiry() {
    let Some(place) = Keyspace::new() else { return };
    let store = place.open_with(Keyspace::options(), &Clock::system());
    wait(store.begin(1, said(7))).expect("begun");
    let keyspace = &place.connection.keyspace;
    let forget = format!("TRUNCATE {keyspace}.policies");
    runtime().block_on(store.shared.database().session.query_unpaged(forget, ())).expect("forgotten");
    let again = || runtime().block_on(say_again(&store.shared));
    again();
    assert_eq!(told(&place, &store), [], "it is not time yet");
    store.shared.policies.was_said(Duration::from_secs(1_000));
    again();
    assert_eq!(over(&told(&place, &store)), [false]);
    store.shared.policies.was_said(Duration::from_secs(3_601));
    assert_eq!(store.told_policies(), None, "it may be forgotten before nobody comes back any more");
    again();
    assert_eq!(store.told_policies(), Some(7));
}

#[test]
fn policies_read_includes_all_announced_before_it() {
    let Some(place) = Keyspace::new() else { return };
    let store = place.open_with(Keyspace::options(), &Clock::system());
    let mut reads = Vec::new();
    for policies in 1..=20 {
        wait(store.begin(1, said(policies))).expect("said");
        reads.extend((0..5).map(|_| (policies, store.lately_kept())));
    }
    for (policies, read) in reads {
        let kept = wait(read).expect("read");
        assert!((1..=policies).all(|one| kept.contains(&(1, one))), "{policies}: {kept:?}");
    }
}
