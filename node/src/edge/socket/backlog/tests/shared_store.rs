//! Backfill after a position from the rows of several incarnations.

use super::super::shared_store::SharedStoreCursor;
use super::*;
use crate::session::Rewind;

/// Incarnations of other nodes; the last one is down.
const THERE: u64 = 21;
const YONDER: u64 = 22;
const DOWN: u64 = 23;

fn serial(entries: &[(u64, u64)]) -> Serial {
    let mut serial = Serial::default();
    entries.iter().for_each(|(incarnation, sequence)| serial.advance(*incarnation, *sequence));
    serial
}

/// Cursor of a client with this position, at this attach position of the channel.
fn reading(bench: &BacklogFixture, position: &Serial, attach_position: &Serial) -> SharedStoreCursor {
    let living = [THERE, YONDER, bench.own()];
    let living =
        living.map(|incarnation| (incarnation, attach_position.sequence_of(incarnation).unwrap_or(0)));
    let cursor = HistoryPosition { timestamp_ms: 0, sequence: 0, incarnation: 0 };
    let (position, attach_position) = (position.clone(), attach_position.clone());
    let (living, undelivered) = (serial(&living), Vec::new());
    let (handed, awaited) = Default::default();
    SharedStoreCursor {
        position,
        attach_position,
        live_until: living,
        undelivered_incarnations: undelivered,
        delivered_until: handed,
        awaited,
        cursor,
        end_ms: 0,
        uncertain_before_ms: 0,
    }
}

impl BacklogFixture {
    /// Stores a message of an incarnation with this age.
    fn store(&self, incarnation: u64, sequence: u64, age_ms: u64) {
        let published = message(incarnation, sequence, self.shared.clock.now_ms() - age_ms);
        self.shared.store.append(published, Some(72), Box::new(|_| {}));
    }

    /// Reads all pages. Returns the data numbers and the client's position after them.
    async fn drain(&self, found: Option<BacklogResponse>) -> Option<(Vec<u64>, Serial)> {
        let BacklogResponse::SharedBegin { mut reading, .. } = found? else {
            unreachable!("a reading was asked for")
        };
        let (mut numbers, mut is_complete) = (Vec::new(), false);
        while !is_complete {
            let found = self.rows().next_shared_page(reading, Format::Json, None).await?;
            let BacklogResponse::SharedPage { frames, reading: next, is_end, .. } = found else {
                unreachable!("a page was asked for")
            };
            numbers.extend(frames.iter().map(number_in));
            (reading, is_complete) = (next, is_end);
        }
        Some((numbers, reading.end()))
    }

    async fn after(
        &self,
        position: &Serial,
        attach_position: &Serial,
        back_ms: u64,
    ) -> Option<(Vec<u64>, Serial)> {
        self.shared.store.flush().await.expect("the store is well");
        let found = self.rows().begin_after(reading(self, position, attach_position), Some(back_ms)).await;
        self.drain(found).await
    }
}

#[tokio::test]
async fn each_incarnation_is_read_from_position_to_first_delivery() {
    let bench = BacklogFixture::new();
    for (age_ms, incarnation, sequence) in [
        (90_000, THERE, 3),
        (80_000, DOWN, 70),
        (70_000, YONDER, 500),
        (60_000, THERE, 900),
        (50_000, DOWN, 71),
        (40_000, THERE, 901),
        (30_000, YONDER, 501),
        (20_000, DOWN, 75),
        (10_000, THERE, 902),
    ] {
        bench.store(incarnation, sequence, age_ms);
    }
    let attach_position = serial(&[(THERE, 901), (YONDER, 700), (bench.own(), 4)]);
    let end = |down| serial(&[(THERE, 901), (YONDER, 700), (bench.own(), 4), (DOWN, down)]);
    for (position, expected) in [
        ([(THERE, 3), (DOWN, 70), (YONDER, 500)], vec![900, 71, 901, 501, 75]),
        ([(THERE, 899), (DOWN, 71), (YONDER, 499)], vec![500, 900, 901, 501, 75]),
        ([(THERE, 901), (DOWN, 75), (YONDER, 501)], vec![]),
        ([(THERE, 901), (DOWN, 71), (YONDER, 600)], vec![75]),
    ] {
        let found = bench.after(&serial(&position), &attach_position, 240_000).await;
        assert_eq!(found, Some((expected, end(75))), "{position:?}");
    }
    // The client had received a message of the node that is down and that was never stored.
    let found =
        bench.after(&serial(&[(THERE, 901), (DOWN, 79), (YONDER, 501)]), &attach_position, 240_000).await;
    assert_eq!(found, Some((vec![], end(79))));
    let known = bench.channel.position().serial();
    assert_eq!(known.sequence_of(DOWN), Some(75), "so it stands in positions from now on");
}

#[tokio::test]
async fn a_position_that_may_be_too_old_is_not_followed() {
    let bench = BacklogFixture::new();
    for (age_ms, sequence) in [(400_000, 1), (300_000, 2), (200_000, 3), (100_000, 4)] {
        bench.store(THERE, sequence, age_ms);
    }
    let attach_position = serial(&[(THERE, 4)]);
    for (sequence, back_ms, expected) in [
        (1, 240_000, None),
        (2, 240_000, Some(vec![3, 4])),
        (2, 120_000, None),
        (3, 120_000, Some(vec![4])),
        (4, 10_000, Some(vec![])),
    ] {
        let found = bench.after(&serial(&[(THERE, sequence)]), &attach_position, back_ms).await;
        assert_eq!(found.map(|found| found.0), expected, "{sequence} within {back_ms}");
    }
    assert_eq!(
        bench.after(&serial(&[(YONDER, 9)]), &attach_position, 240_000).await,
        None,
        "of whom nothing is there"
    );
    let bench = BacklogFixture::new();
    let found = bench.after(&serial(&[(YONDER, 9)]), &attach_position, 240_000).await;
    assert_eq!(found, Some((vec![], serial(&[(THERE, 4), (YONDER, 9)]))), "nothing was ever stored");
}

#[tokio::test]
async fn rows_of_retired_incarnation_are_given_if_surely_missed() {
    let bench = BacklogFixture::new();
    let (position, attach_position) = (serial(&[(THERE, 5)]), serial(&[(THERE, 6)]));
    bench.store(THERE, 5, 100_000);
    bench.store(DOWN, 1, 90_000);
    bench.store(THERE, 6, 80_000);
    let found = bench.after(&position, &attach_position, 240_000).await;
    assert_eq!(found.map(|found| found.0), Some(vec![1, 6]), "behind what it has");
    bench.store(YONDER, 1, 110_000);
    let found = bench.after(&position, &attach_position, 240_000).await;
    assert_eq!(found.map(|found| found.0), Some(vec![1, 6]), "it lives and has said that it had nothing");
    bench.store(DOWN - 10, 1, 120_000);
    assert_eq!(
        bench.after(&position, &attach_position, 240_000).await,
        None,
        "it may be from before the client came"
    );
    // The incarnation had ended before this node began, and the position is from later.
    let position = serial(&[(THERE, 5), (bench.own(), 1)]);
    let mut bench = bench;
    bench.shared.ready_ms += 60_000;
    assert_eq!(bench.after(&position, &attach_position, 240_000).await.map(|found| found.0), Some(vec![6]));
}

#[tokio::test]
async fn rows_of_retired_incarnation_do_not_hide_other_positions() {
    let (position, attach_position) = (serial(&[(THERE, 6)]), serial(&[(THERE, 7)]));
    for (rows, age_ms, expected) in [
        (40, 130_000, Some(vec![7])),
        (10 * 512, 130_000, Some(vec![7])),
        // Too close before the position, within the difference of clocks.
        (40, 80_000, None),
        // So many rows that not all of them are read.
        (40 * 512, 130_000, None),
    ] {
        let bench = BacklogFixture::new();
        bench.store(THERE, 5, 200_000);
        (1..=rows).for_each(|sequence| bench.store(DOWN, sequence, age_ms - sequence / 2));
        bench.store(THERE, 6, 50_000);
        bench.store(THERE, 7, 40_000);
        let found = bench.after(&position, &attach_position, 240_000).await;
        assert_eq!(found.map(|found| found.0), expected, "{rows} rows, {age_ms} ms ago");
    }
}

#[tokio::test]
async fn rewind_reads_all_incarnations_up_to_their_deliveries() {
    let bench = BacklogFixture::new();
    for (age_ms, incarnation, sequence) in [
        (60_000, YONDER, 2),
        (50_000, THERE, 7),
        (50_000, DOWN, 70),
        (40_000, THERE, 8),
        (30_000, DOWN, 71),
        (20_000, THERE, 9),
        (10_000, YONDER, 3),
    ] {
        bench.store(incarnation, sequence, age_ms);
    }
    bench.shared.store.flush().await.expect("the store is well");
    let attach_position = serial(&[(THERE, 8), (YONDER, 2)]);
    for (count, expected, begin) in [
        (1, vec![71], [(THERE, 8), (YONDER, 2), (DOWN, 70)]),
        (3, vec![70, 8, 71], [(THERE, 7), (YONDER, 2), (DOWN, 69)]),
        (9, vec![2, 7, 70, 8, 71], [(THERE, 6), (YONDER, 1), (DOWN, 69)]),
    ] {
        let rewind = Rewind { count, since_ms: 0, is_cut: false };
        let found =
            bench.rows().begin_rewind(reading(&bench, &Serial::default(), &attach_position), rewind).await;
        let Some(BacklogResponse::SharedBegin { reading, .. }) = &found else {
            unreachable!("a reading was asked for")
        };
        assert_eq!(reading.position, serial(&begin), "{count}");
        let end = serial(&[(THERE, 8), (YONDER, 2), (DOWN, 71)]);
        assert_eq!(bench.drain(found).await, Some((expected, end)));
    }
}

/// A partitioned node takes publishes, which are delivered when the partition heals.
#[tokio::test]
async fn rows_stored_late_by_down_incarnation_are_not_given_twice() {
    let bench = BacklogFixture::new();
    for (age_ms, incarnation, sequence) in
        [(60_000, THERE, 7), (50_000, DOWN, 70), (40_000, DOWN, 71), (30_000, THERE, 8), (20_000, DOWN, 72)]
    {
        bench.store(incarnation, sequence, age_ms);
    }
    bench.shared.store.flush().await.expect("the store is well");
    let attach_position = serial(&[(THERE, 8), (YONDER, 0), (DOWN, 69)]);
    let cursor_after = |position: &[(u64, u64)]| SharedStoreCursor {
        undelivered_incarnations: vec![THERE, YONDER, DOWN],
        delivered_until: serial(&[(DOWN, 71)]),
        ..reading(&bench, &serial(position), &attach_position)
    };
    let end = serial(&[(THERE, 8), (YONDER, 0), (DOWN, 71)]);
    let found = bench.rows().begin_after(cursor_after(&[(THERE, 7), (DOWN, 69)]), Some(240_000)).await;
    assert_eq!(bench.drain(found).await, Some((vec![70, 71, 8], end.clone())));
    let rewind = Rewind { count: 2, since_ms: 0, is_cut: false };
    let found = bench.rows().begin_rewind(cursor_after(&[]), rewind).await;
    assert_eq!(bench.drain(found).await, Some((vec![71, 8], end)));
    let known = bench.channel.position().serial();
    assert_eq!(known.sequence_of(DOWN), None, "it comes by delivery");
}

/// The message was delivered here before the attach, and is part of the reader's final position.
#[tokio::test]
async fn unstored_message_of_down_incarnation_is_no_silent_gap() {
    let bench = BacklogFixture::new();
    for (age_ms, incarnation, sequence) in [(60_000, THERE, 7), (50_000, DOWN, 70), (30_000, THERE, 8)] {
        bench.store(incarnation, sequence, age_ms);
    }
    bench.shared.store.flush().await.expect("the store is well");
    let (position, attach_position) = (serial(&[(THERE, 7), (DOWN, 69)]), serial(&[(THERE, 8), (DOWN, 71)]));
    let reads = async |awaited: &Serial| {
        let reading =
            SharedStoreCursor { awaited: awaited.clone(), ..reading(&bench, &position, &attach_position) };
        let found = bench.rows().begin_after(reading, Some(240_000)).await;
        Some(bench.drain(found).await?.0)
    };
    assert_eq!(reads(&Serial::default()).await, Some(vec![70, 8]), "it will not store any more");
    let awaited = serial(&[(DOWN, 71)]);
    assert_eq!(reads(&awaited).await, None);
    bench.store(DOWN, 71, 40_000);
    bench.shared.store.flush().await.expect("the store is well");
    assert_eq!(reads(&awaited).await, Some(vec![70, 71, 8]));
}
