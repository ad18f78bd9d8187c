//! Messages that the hub numbered, and that the store has or misses.

mod settled;
mod shared_store;

use serde_json::value::RawValue;
use tempfile::TempDir;

use super::*;
use crate::accounts::Accounts;
use crate::model::{AccountId, ChannelKey, ChannelName, Message, PublishedMessages};
use crate::origin::history::{EmbeddedOptions, EmbeddedStore, HistoryCoverage};
use crate::testing::DirectoryText;

const EARLIER: u64 = 7;
/// The incarnation before [`EARLIER`].
const EARLIEST: u64 = 9;

/// A node without replay buffers, so that all messages come from the store.
struct BacklogFixture {
    shared: BacklogContext,
    channel: Arc<Channel>,
    _folder: TempDir,
}

impl BacklogFixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let clock = Clock::system();
        let limits = Limits { ring_bytes: 0, ..Limits::default() };
        let store = EmbeddedStore::open(folder.path(), &EmbeddedOptions::new(true, &limits), clock.clone())
            .expect("a store");
        let store: Arc<dyn HistoryStore> = Arc::new(store);
        let hub = Arc::new(Hub::new(Vec::new(), clock.clone(), &limits));
        let directory = DirectoryText::default().account("acme");
        let accounts = Accounts::from_text(directory.text()).expect("a directory");
        let (channel, _) = hub.attach(&key(), 0);
        let last_ms = clock.now_ms();
        let earlier = [EARLIER, EARLIEST]
            .map(|incarnation| FollowedIncarnation { incarnation, last_ms, passed_ms: 0 })
            .into();
        let shared = BacklogContext {
            publisher: Publisher::new(&hub, &store, &limits, None),
            policy_changes: accounts.policy_changes(),
            keep_ms: 2 * limits.resume_window_ms,
            window_ms: limits.resume_window_ms,
            ready: Instant::now(),
            ready_ms: clock.now_ms(),
            hub,
            store,
            accounts,
            clock,
            earlier_incarnations: earlier,
        };
        Self { shared, channel, _folder: folder }
    }

    fn own(&self) -> u64 {
        self.shared.hub.incarnation()
    }

    /// Publishes a message of this incarnation, which the store may miss.
    fn publish(&self, is_stored: bool) {
        self.shared.hub.publish(&key(), 1, |numbering| {
            let crate::hub::Numbering { incarnation, first_sequence, timestamp_ms } = numbering;
            let published = message(incarnation, first_sequence, timestamp_ms);
            if is_stored {
                self.shared.store.append(Arc::clone(&published), Some(72), Box::new(|_| {}));
            }
            published
        });
    }

    fn publish_earlier(&self, sequences: &[u64]) {
        self.publish_of(EARLIER, sequences);
    }

    fn publish_of(&self, incarnation: u64, sequences: &[u64]) {
        for sequence in sequences {
            let published = message(incarnation, *sequence, self.shared.clock.highest_ms());
            self.shared.store.append(published, Some(72), Box::new(|_| {}));
        }
        // No message of the next incarnation has the time of one of this.
        self.shared.clock.raise(self.shared.clock.highest_ms() + 1);
    }

    fn rows(&self) -> ChannelBacklog<'_> {
        ChannelBacklog { shared: &self.shared, channel: &self.channel, oldest_ms: 0 }
    }

    /// Reads the data numbers after the stamp, and the stamp that the reader reaches; none on a continuity loss.
    async fn read(&self, after: Stamp) -> Option<(Vec<u64>, Stamp)> {
        let end_offset = self.channel.position().offset;
        let BacklogResponse::Begin { mut cursor, .. } =
            self.rows().find_after(after, end_offset, Some(self.shared.keep_ms)).await?
        else {
            unreachable!("a beginning was asked for")
        };
        let mut seen = Vec::new();
        loop {
            let BacklogResponse::Page(page) = self.rows().page(cursor, Format::Json, None).await? else {
                unreachable!("a page was asked for")
            };
            if page.cursor == cursor {
                return Some((seen, cursor.after));
            }
            cursor = page.cursor;
            seen.extend(page.frames.iter().map(number_in));
        }
    }
}

fn key() -> ChannelKey {
    ChannelKey::new(AccountId::new("acme"), ChannelName::of("a"))
}

/// The data of the one message in a frame.
fn number_in(frame: &Bytes) -> u64 {
    let text = String::from_utf8_lossy(frame);
    let (_, data) = text.split_once("\"data\":").expect("a message");
    data.split(',').next().and_then(|number| number.parse().ok()).expect("a number as data")
}

/// A message whose data is its sequence.
fn message(incarnation: u64, sequence: u64, timestamp_ms: u64) -> Arc<PublishedMessages> {
    let data = RawValue::from_string(sequence.to_string()).expect("a number is JSON");
    let message = Message {
        id: format!("{incarnation}-{sequence}").into(),
        id_given: false,
        sequence,
        name: None,
        data: Some(data),
        extras: None,
    };
    let connection_id = ConnectionId::from_bytes([1; 16]);
    PublishedMessages::new(key(), incarnation, timestamp_ms, connection_id, None, "k".into(), vec![message])
}

#[tokio::test]
async fn backlog_of_one_incarnation_is_read_without_gaps() {
    let bench = BacklogFixture::new();
    (1..=1_200).for_each(|_| bench.publish(true));
    let own = |sequence| Stamp { incarnation: bench.own(), sequence };
    for after in [0, 1, 599, 1_199, 1_200] {
        let expected = ((after + 1..=1_200).collect(), own(1_200));
        assert_eq!(bench.read(own(after)).await, Some(expected), "after {after}");
    }
    assert_eq!(bench.read(own(1_201)).await, None, "not numbered yet");
}

#[tokio::test]
async fn a_message_that_is_not_stored_is_a_gap() {
    let bench = BacklogFixture::new();
    (1..=20).for_each(|number| bench.publish(number != 11));
    let own = |sequence| Stamp { incarnation: bench.own(), sequence };
    assert_eq!(bench.read(own(3)).await, None);
    assert_eq!(bench.read(own(10)).await, None);
    assert!(bench.read(own(11)).await.is_some());
    bench.publish(false);
    assert_eq!(bench.read(own(15)).await, None, "the last one is missing");
}

#[tokio::test]
async fn previous_incarnation_is_followed_by_all_of_the_current() {
    let bench = BacklogFixture::new();
    bench.publish_earlier(&[3, 4, 5, 6]);
    let earlier = |sequence| Stamp { incarnation: EARLIER, sequence };
    let own = |sequence| Stamp { incarnation: bench.own(), sequence };
    assert_eq!(bench.read(earlier(6)).await, Some((vec![], own(0))), "its place is one of this run");
    (1..=3).for_each(|_| bench.publish(true));
    assert_eq!(bench.read(earlier(4)).await, Some((vec![5, 6, 1, 2, 3], own(3))));
    assert_eq!(bench.read(earlier(9)).await, Some((vec![1, 2, 3], own(3))), "delivered, and not stored");
    assert_eq!(bench.read(earlier(1)).await, None, "what was before is not known");
}

#[tokio::test]
async fn gap_in_the_previous_incarnation_prevents_store_backfill() {
    let bench = BacklogFixture::new();
    bench.publish_earlier(&[3, 4, 6]);
    bench.publish(true);
    let earlier = |sequence| Stamp { incarnation: EARLIER, sequence };
    assert_eq!(bench.read(earlier(3)).await, None);
    assert!(bench.read(earlier(5)).await.is_some());
}

#[tokio::test]
async fn older_incarnation_is_followed_by_previous_and_current() {
    let bench = BacklogFixture::new();
    bench.publish_of(77, &[1, 2]);
    bench.publish_of(EARLIEST, &[3, 4, 5]);
    // A channel that was forgotten meanwhile continues at a higher sequence.
    bench.publish_of(EARLIER, &[1, 2, 9]);
    let before = |sequence| Stamp { incarnation: EARLIEST, sequence };
    let own = |sequence| Stamp { incarnation: bench.own(), sequence };
    assert_eq!(bench.read(before(4)).await, Some((vec![5, 1, 2, 9], own(0))));
    (1..=2).for_each(|_| bench.publish(true));
    for (after, expected) in
        [(3, vec![4, 5, 1, 2, 9, 1, 2]), (5, vec![1, 2, 9, 1, 2]), (8, vec![1, 2, 9, 1, 2])]
    {
        assert_eq!(bench.read(before(after)).await, Some((expected, own(2))), "after {after}");
    }
    assert_eq!(bench.read(before(1)).await, None, "what was before is not known");
    assert_eq!(bench.read(Stamp { incarnation: EARLIER, sequence: 1 }).await, None, "2 is followed by 9");
    assert_eq!(bench.read(Stamp { incarnation: 77, sequence: 1 }).await, None, "a run that nobody knows");
}

#[test]
fn incarnations_are_followed_back_to_a_different_one() {
    let previous = |incarnation, policies, is_all, began_ms, last_ms| PreviousIncarnation {
        incarnation,
        coverage: HistoryCoverage {
            policies,
            has_changed: false,
            is_complete: is_all,
            outlasts_resume_window: false,
        },
        began_ms,
        last_ms,
    };
    let followed = |incarnations: &[PreviousIncarnation]| -> Vec<(u64, u64)> {
        FollowedIncarnation::followed(incarnations, 8)
            .iter()
            .map(|earlier| (earlier.incarnation, earlier.passed_ms))
            .collect()
    };
    let [third, second, first] =
        [previous(3, 8, true, 500, 700), previous(2, 8, true, 300, 400), previous(1, 8, true, 100, 90)];
    assert_eq!(followed(&[third, second, first]), [(3, 0), (2, 200), (1, 300)]);
    let (other, misses) = (previous(2, 9, true, 300, 400), previous(2, 8, false, 300, 400));
    assert_eq!(followed(&[third, other, first]), [(3, 0)], "it kept other channels");
    assert_eq!(
        followed(&[third, misses, first]),
        [(3, 0), (2, 200)],
        "it may be begun from, not passed through"
    );
    assert_eq!(followed(&[]), []);
}

#[tokio::test]
async fn a_position_reaches_no_further_back_than_its_client_may() {
    let bench = BacklogFixture::new();
    let (end_offset, now_ms) = (bench.channel.position().offset, bench.shared.clock.now_ms());
    (1..=3).for_each(|_| bench.publish(false));
    for (sequence, age_ms) in [(1, 300_000), (2, 200_000), (3, 100_000)] {
        let published = message(bench.own(), end_offset + sequence, now_ms - age_ms);
        bench.shared.store.append(published, Some(72), Box::new(|_| {}));
    }
    let rows = bench.rows();
    for (after, back_ms, is_found) in [
        (0, None, true),
        (0, Some(310_000), true),
        (0, Some(240_000), false),
        (1, Some(240_000), true),
        (1, Some(120_000), false),
        (2, Some(120_000), true),
        (3, Some(120_000), true),
    ] {
        let after = Stamp { incarnation: bench.own(), sequence: end_offset + after };
        let found = rows.find_after(after, end_offset + 3, back_ms).await;
        assert_eq!(found.is_some(), is_found, "{after:?} {back_ms:?}");
    }
}

#[tokio::test]
async fn client_within_retention_is_not_refused_for_rounded_cutoff() {
    let bench = BacklogFixture::new();
    let end_offset = bench.channel.position().offset;
    bench.publish(true);
    let after = Stamp { incarnation: bench.own(), sequence: end_offset };
    let kept_ms = 72 * 3_600_000;
    let policy = ChannelPolicy { history: true, retention_hours: 72 };
    for (longer_ms, is_found) in [(0, true), (5_000, false)] {
        let oldest_ms = policy.oldest_ms(bench.shared.clock.now_ms());
        let rows = ChannelBacklog { oldest_ms, ..bench.rows() };
        let found = rows.find_after(after, end_offset + 1, Some(kept_ms + longer_ms)).await;
        assert_eq!(found.is_some(), is_found, "{longer_ms} ms longer");
    }
}
