//! What follows a position in the rows of several runs.

use super::super::everywhere::Reading;
use super::*;
use crate::session::Rewind;

/// Runs of other nodes, of which the last is dead.
const THERE: u64 = 21;
const YONDER: u64 = 22;
const DEAD: u64 = 23;

fn serial(entries: &[(u64, u64)]) -> Serial {
    let mut serial = Serial::default();
    entries.iter().for_each(|(run, sequence)| serial.advance(*run, *sequence));
    serial
}

/// Of who has come with this position where the channel stood there.
fn reading(bench: &Bench, has: &Serial, stands: &Serial) -> Reading {
    let living = [THERE, YONDER, bench.own()];
    let living = living.map(|run| (run, stands.sequence_of(run).unwrap_or(0)));
    let cursor = Position { timestamp_ms: 0, sequence: 0, incarnation: 0 };
    let (has, stands) = (has.clone(), stands.clone());
    let (living, owed) = (serial(&living), Vec::new());
    let (handed, awaited) = Default::default();
    Reading { has, stands, living, owed, handed, awaited, cursor, end_ms: 0, sure_ms: 0 }
}

impl Bench {
    /// A message of a run, so long ago.
    fn store(&self, run: u64, sequence: u64, age_ms: u64) {
        let published = message(run, sequence, self.shared.clock.now_ms() - age_ms);
        self.shared.store.append(published, Some(72), Box::new(|_| {}));
    }

    /// What is given, and the position then.
    async fn given(&self, found: Option<Found>) -> Option<(Vec<u64>, Serial)> {
        let Found::Reading { mut reading, .. } = found? else { unreachable!("a reading was asked for") };
        let (mut numbers, mut is_over) = (Vec::new(), false);
        while !is_over {
            let found = self.rows().read_on(reading, Format::Json, None).await?;
            let Found::Read { frames, reading: next, is_end, .. } = found else {
                unreachable!("a page was asked for")
            };
            numbers.extend(frames.iter().map(number_in));
            (reading, is_over) = (next, is_end);
        }
        Some((numbers, reading.end()))
    }

    async fn after(&self, has: &Serial, stands: &Serial, back_ms: u64) -> Option<(Vec<u64>, Serial)> {
        self.shared.store.settled().await.expect("the store is well");
        let found = self.rows().begin_after(reading(self, has, stands), Some(back_ms)).await;
        self.given(found).await
    }
}

#[tokio::test]
async fn each_incarnation_is_read_from_position_to_first_delivery() {
    let bench = Bench::new();
    for (age_ms, run, sequence) in [
        (90_000, THERE, 3),
        (80_000, DEAD, 70),
        (70_000, YONDER, 500),
        (60_000, THERE, 900),
        (50_000, DEAD, 71),
        (40_000, THERE, 901),
        (30_000, YONDER, 501),
        (20_000, DEAD, 75),
        (10_000, THERE, 902),
    ] {
        bench.store(run, sequence, age_ms);
    }
    let stands = serial(&[(THERE, 901), (YONDER, 700), (bench.own(), 4)]);
    let end = |dead| serial(&[(THERE, 901), (YONDER, 700), (bench.own(), 4), (DEAD, dead)]);
    for (has, expected) in [
        ([(THERE, 3), (DEAD, 70), (YONDER, 500)], vec![900, 71, 901, 501, 75]),
        ([(THERE, 899), (DEAD, 71), (YONDER, 499)], vec![500, 900, 901, 501, 75]),
        ([(THERE, 901), (DEAD, 75), (YONDER, 501)], vec![]),
        ([(THERE, 901), (DEAD, 71), (YONDER, 600)], vec![75]),
    ] {
        let found = bench.after(&serial(&has), &stands, 240_000).await;
        assert_eq!(found, Some((expected, end(75))), "{has:?}");
    }
    // It had heard of the dead one what was never stored.
    let found = bench.after(&serial(&[(THERE, 901), (DEAD, 79), (YONDER, 501)]), &stands, 240_000).await;
    assert_eq!(found, Some((vec![], end(79))));
    let known = bench.channel.mark().serial();
    assert_eq!(known.sequence_of(DEAD), Some(75), "so it stands in positions from now on");
}

#[tokio::test]
async fn a_position_that_may_be_too_old_is_not_followed() {
    let bench = Bench::new();
    for (age_ms, sequence) in [(400_000, 1), (300_000, 2), (200_000, 3), (100_000, 4)] {
        bench.store(THERE, sequence, age_ms);
    }
    let stands = serial(&[(THERE, 4)]);
    for (sequence, back_ms, expected) in [
        (1, 240_000, None),
        (2, 240_000, Some(vec![3, 4])),
        (2, 120_000, None),
        (3, 120_000, Some(vec![4])),
        (4, 10_000, Some(vec![])),
    ] {
        let found = bench.after(&serial(&[(THERE, sequence)]), &stands, back_ms).await;
        assert_eq!(found.map(|found| found.0), expected, "{sequence} within {back_ms}");
    }
    assert_eq!(
        bench.after(&serial(&[(YONDER, 9)]), &stands, 240_000).await,
        None,
        "of whom nothing is there"
    );
    let bench = Bench::new();
    let found = bench.after(&serial(&[(YONDER, 9)]), &stands, 240_000).await;
    assert_eq!(found, Some((vec![], serial(&[(THERE, 4), (YONDER, 9)]))), "nothing was ever stored");
}

#[tokio::test]
async fn rows_of_retired_incarnation_are_given_if_surely_missed() {
    let bench = Bench::new();
    let (has, stands) = (serial(&[(THERE, 5)]), serial(&[(THERE, 6)]));
    bench.store(THERE, 5, 100_000);
    bench.store(DEAD, 1, 90_000);
    bench.store(THERE, 6, 80_000);
    let found = bench.after(&has, &stands, 240_000).await;
    assert_eq!(found.map(|found| found.0), Some(vec![1, 6]), "behind what it has");
    bench.store(YONDER, 1, 110_000);
    let found = bench.after(&has, &stands, 240_000).await;
    assert_eq!(found.map(|found| found.0), Some(vec![1, 6]), "it lives and has said that it had nothing");
    bench.store(DEAD - 10, 1, 120_000);
    assert_eq!(bench.after(&has, &stands, 240_000).await, None, "it may be from before the client came");
    // It was gone before this node began, of which the position knows.
    let has = serial(&[(THERE, 5), (bench.own(), 1)]);
    let mut bench = bench;
    bench.shared.ready_ms += 60_000;
    assert_eq!(bench.after(&has, &stands, 240_000).await.map(|found| found.0), Some(vec![6]));
}

#[tokio::test]
async fn rows_of_retired_incarnation_do_not_hide_other_positions() {
    let (has, stands) = (serial(&[(THERE, 6)]), serial(&[(THERE, 7)]));
    for (rows, age_ms, expected) in [
        (40, 130_000, Some(vec![7])),
        (10 * 512, 130_000, Some(vec![7])),
        // So close before what it has that clocks may differ by more.
        (40, 80_000, None),
        // So many that they are not all looked at.
        (40 * 512, 130_000, None),
    ] {
        let bench = Bench::new();
        bench.store(THERE, 5, 200_000);
        (1..=rows).for_each(|sequence| bench.store(DEAD, sequence, age_ms - sequence / 2));
        bench.store(THERE, 6, 50_000);
        bench.store(THERE, 7, 40_000);
        let found = bench.after(&has, &stands, 240_000).await;
        assert_eq!(found.map(|found| found.0), expected, "{rows} rows, {age_ms} ms ago");
    }
}

#[tokio::test]
async fn a_rewind_begins_in_all_runs_and_ends_where_deliveries_begin() {
    let bench = Bench::new();
    for (age_ms, run, sequence) in [
        (60_000, YONDER, 2),
        (50_000, THERE, 7),
        (50_000, DEAD, 70),
        (40_000, THERE, 8),
        (30_000, DEAD, 71),
        (20_000, THERE, 9),
        (10_000, YONDER, 3),
    ] {
        bench.store(run, sequence, age_ms);
    }
    bench.shared.store.settled().await.expect("the store is well");
    let stands = serial(&[(THERE, 8), (YONDER, 2)]);
    for (count, expected, begin) in [
        (1, vec![71], [(THERE, 8), (YONDER, 2), (DEAD, 70)]),
        (3, vec![70, 8, 71], [(THERE, 7), (YONDER, 2), (DEAD, 69)]),
        (9, vec![2, 7, 70, 8, 71], [(THERE, 6), (YONDER, 1), (DEAD, 69)]),
    ] {
        let rewind = Rewind { count, since_ms: 0, is_cut: false };
        let found = bench.rows().begin_back(reading(&bench, &Serial::default(), &stands), rewind).await;
        let Some(Found::Reading { reading, .. }) = &found else { unreachable!("a reading was asked for") };
        assert_eq!(reading.has, serial(&begin), "{count}");
        let end = serial(&[(THERE, 8), (YONDER, 2), (DEAD, 71)]);
        assert_eq!(bench.given(found).await, Some((expected, end)));
    }
}

/// It takes publishes behind a cut, which come by delivery when that is healed.
#[tokio::test]
async fn rows_stored_late_by_down_incarnation_are_not_given_twice() {
    let bench = Bench::new();
    for (age_ms, run, sequence) in
        [(60_000, THERE, 7), (50_000, DEAD, 70), (40_000, DEAD, 71), (30_000, THERE, 8), (20_000, DEAD, 72)]
    {
        bench.store(run, sequence, age_ms);
    }
    bench.shared.store.settled().await.expect("the store is well");
    let stands = serial(&[(THERE, 8), (YONDER, 0), (DEAD, 69)]);
    let held_for_dead = |has: &[(u64, u64)]| Reading {
        owed: vec![THERE, YONDER, DEAD],
        handed: serial(&[(DEAD, 71)]),
        ..reading(&bench, &serial(has), &stands)
    };
    let end = serial(&[(THERE, 8), (YONDER, 0), (DEAD, 71)]);
    let found = bench.rows().begin_after(held_for_dead(&[(THERE, 7), (DEAD, 69)]), Some(240_000)).await;
    assert_eq!(bench.given(found).await, Some((vec![70, 71, 8], end.clone())));
    let rewind = Rewind { count: 2, since_ms: 0, is_cut: false };
    let found = bench.rows().begin_back(held_for_dead(&[]), rewind).await;
    assert_eq!(bench.given(found).await, Some((vec![71, 8], end)));
    let known = bench.channel.mark().serial();
    assert_eq!(known.sequence_of(DEAD), None, "it comes by delivery");
}

/// It was delivered here before the reader came, and is in the position that the reader would have at the end.
#[tokio::test]
async fn unstored_message_of_down_incarnation_is_no_silent_gap() {
    let bench = Bench::new();
    for (age_ms, run, sequence) in [(60_000, THERE, 7), (50_000, DEAD, 70), (30_000, THERE, 8)] {
        bench.store(run, sequence, age_ms);
    }
    bench.shared.store.settled().await.expect("the store is well");
    let (has, stands) = (serial(&[(THERE, 7), (DEAD, 69)]), serial(&[(THERE, 8), (DEAD, 71)]));
    let reads = async |awaited: &Serial| {
        let reading = Reading { awaited: awaited.clone(), ..reading(&bench, &has, &stands) };
        let found = bench.rows().begin_after(reading, Some(240_000)).await;
        Some(bench.given(found).await?.0)
    };
    assert_eq!(reads(&Serial::default()).await, Some(vec![70, 8]), "it will not store any more");
    let awaited = serial(&[(DEAD, 71)]);
    assert_eq!(reads(&awaited).await, None);
    bench.store(DEAD, 71, 40_000);
    bench.shared.store.settled().await.expect("the store is well");
    assert_eq!(reads(&awaited).await, Some(vec![70, 71, 8]));
}
