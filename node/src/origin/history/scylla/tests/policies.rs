//! Policy announcements of the incarnations of several nodes, and how long they last.

use super::*;
use crate::origin::history::scylla::policies::renew_announcement;

/// Announced policies, sorted by incarnation, with the seconds until each expires.
fn announced(fixture: &KeyspaceFixture, store: &ScyllaStore) -> Vec<(u64, u64, u64)> {
    let mut kept = wait(store.recent_policies()).expect("read");
    kept.sort_unstable();
    let keyspace = &fixture.connection.keyspace;
    let statement = format!("SELECT incarnation, policies, TTL(is_over) FROM {keyspace}.policies");
    let found = runtime().block_on(store.shared.database().session.query_unpaged(statement, ()));
    let found = found.expect("read").into_rows_result().expect("rows");
    let rows = found.rows::<(i64, i64, i32)>().expect("the columns are what they are");
    let row = |(incarnation, policies, left): (i64, i64, i32)| {
        let left_s = u64::try_from(left).expect("it is there");
        (values::unordered(incarnation), values::unordered(policies), left_s)
    };
    let mut rows: Vec<_> = rows.map(|found| row(found.expect("a row"))).collect();
    rows.sort_unstable();
    assert_eq!(
        rows.iter().map(|(incarnation, policies, _)| (*incarnation, *policies)).collect::<Vec<_>>(),
        kept
    );
    rows
}

/// Returns which announcements have ended; also those must outlast the time in which clients may resume.
fn ended(announcements: &[(u64, u64, u64)]) -> Vec<bool> {
    let keeps_s = 2 * Limits::default().resume_window_ms / 1_000;
    assert!(announcements.iter().all(|(_, _, left_s)| *left_s > keeps_s), "{announcements:?}");
    announcements.iter().map(|(_, _, left_s)| *left_s < keeps_s + 100).collect()
}

fn coverage(policies: u64) -> HistoryCoverage {
    HistoryCoverage { policies, has_changed: false, is_complete: true, outlasts_resume_window: false }
}

#[test]
fn policies_of_each_incarnation_visible_to_all_while_they_count() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let open = |node: &str| {
        fixture.open_with(ScyllaOptions { node_id: node.into(), ..KeyspaceFixture::options() }, &clock)
    };
    let incarnations = |announcements: &[(u64, u64, u64)]| {
        announcements.iter().map(|(incarnation, of, _)| (*incarnation, *of)).collect::<Vec<_>>()
    };
    let [one, other] = ["n1", "n2"].map(open);
    assert_eq!((announced(&fixture, &one), one.announced_policies()), (vec![], None));
    wait(one.begin_incarnation(1, coverage(7))).expect("begun");
    wait(other.begin_incarnation(u64::MAX, coverage(7))).expect("begun");
    let seen = announced(&fixture, &other);
    assert_eq!((incarnations(&seen), ended(&seen)), (vec![(1, 7), (u64::MAX, 7)], vec![false, false]));
    assert_eq!((one.announced_policies(), other.announced_policies()), (Some(7), Some(7)));

    // The policies change, and another announcement is made.
    wait(one.begin_incarnation(1, HistoryCoverage { has_changed: true, ..coverage(u64::MAX - 1) }))
        .expect("said");
    wait(one.begin_incarnation(
        1,
        HistoryCoverage { has_changed: true, outlasts_resume_window: true, ..coverage(u64::MAX - 1) },
    ))
    .expect("said");
    let seen = announced(&fixture, &other);
    assert_eq!(incarnations(&seen), [(1, 7), (1, u64::MAX - 1), (u64::MAX, 7)]);
    assert_eq!(ended(&seen), [true, false, false]);
    assert_eq!(one.announced_policies(), Some(u64::MAX - 1));

    // The policies change back.
    wait(one.begin_incarnation(1, HistoryCoverage { has_changed: true, ..coverage(7) })).expect("said");
    assert_eq!(ended(&announced(&fixture, &other)), [false, true, false]);

    // One node is killed, and one is stopped.
    let one_again = open("n1");
    wait(one_again.begin_incarnation(2, coverage(8))).expect("begun");
    other.shutdown();
    let seen = announced(&fixture, &one_again);
    assert_eq!(incarnations(&seen), [(1, 7), (1, u64::MAX - 1), (2, 8), (u64::MAX, 7)]);
    assert_eq!(ended(&seen), [true, true, false, true]);
    assert_eq!(wait(other.recent_policies()), Err(StoreError::ShutDown));
}

#[test]
fn policies_of_incarnation_are_announced_again_before_expiry() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let store = fixture.open_with(KeyspaceFixture::options(), &Clock::system());
    wait(store.begin_incarnation(1, coverage(7))).expect("begun");
    let keyspace = &fixture.connection.keyspace;
    let forget = format!("TRUNCATE {keyspace}.policies");
    runtime().block_on(store.shared.database().session.query_unpaged(forget, ())).expect("forgotten");
    let again = || runtime().block_on(renew_announcement(&store.shared));
    again();
    assert_eq!(announced(&fixture, &store), [], "it is not time yet");
    store.shared.policies.set_announced_before(Duration::from_secs(1_000));
    again();
    assert_eq!(ended(&announced(&fixture, &store)), [false]);
    store.shared.policies.set_announced_before(Duration::from_secs(3_601));
    assert_eq!(store.announced_policies(), None, "it may be forgotten before nobody comes back any more");
    again();
    assert_eq!(store.announced_policies(), Some(7));
}

#[test]
fn policies_read_includes_all_announced_before_it() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let store = fixture.open_with(KeyspaceFixture::options(), &Clock::system());
    let mut reads = Vec::new();
    for policies in 1..=20 {
        wait(store.begin_incarnation(1, coverage(policies))).expect("said");
        reads.extend((0..5).map(|_| (policies, store.recent_policies())));
    }
    for (policies, read) in reads {
        let kept = wait(read).expect("read");
        assert!((1..=policies).all(|one| kept.contains(&(1, one))), "{policies}: {kept:?}");
    }
}
