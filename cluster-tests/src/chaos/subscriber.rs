//! A client that reads, reconnects to a random node now and then, and checks the order of the messages.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::channel_sequence::ChannelSequence;
use super::{AGAIN, Dice, Shared};
use crate::{SOON, Socket};

/// Bounds of the time after which a client cuts its link.
const CUT_AFTER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
const FRAME_MAX: Duration = Duration::from_millis(200);
/// Age of a duplicate message from which on it is printed, with the frames before it.
const AGAIN_OLD: Duration = Duration::from_secs(10);
/// Greatest time after the last publish until a client has all messages.
const LAST_MAX: Duration = Duration::from_secs(40);

pub(super) struct Subscriber {
    number: usize,
    channels: Vec<String>,
    dice: Dice,
    is_cut: bool,
    shared: Arc<Shared>,
    sequences: HashMap<String, ChannelSequence>,
    counts: SubscriberCounts,
    /// Last frames, for the message of a failed test.
    last: Vec<String>,
}

#[derive(Debug, Default)]
pub(super) struct SubscriberCounts {
    pub(super) attaches: u64,
    pub(super) losses: u64,
    pub(super) missing: u64,
    pub(super) again: u64,
    pub(super) oldest: Duration,
}

impl Subscriber {
    pub(super) fn new(
        number: usize,
        channels: Vec<String>,
        dice: Dice,
        is_cut: bool,
        shared: Arc<Shared>,
    ) -> Self {
        let (sequences, counts, last) = (HashMap::new(), SubscriberCounts::default(), Vec::new());
        Self { number, channels, dice, is_cut, shared, sequences, counts, last }
    }

    /// Runs until the client has all messages. `published` holds their numbers at the end of the course.
    pub(super) async fn run(
        mut self,
        published: watch::Receiver<Option<Vec<(String, u64)>>>,
    ) -> SubscriberCounts {
        let mut end = None;
        loop {
            let Some(mut socket) = self.shared.open(&mut self.dice).await else {
                sleep(AGAIN).await;
                continue;
            };
            let (least, most) = CUT_AFTER;
            let cut = Instant::now() + self.dice.between(least, most);
            if !self.attach_all(&mut socket).await {
                continue;
            }
            loop {
                let all = published.borrow().clone();
                if let Some(all) = all {
                    let end = *end.get_or_insert_with(|| Instant::now() + LAST_MAX);
                    if self.has_all(&all) {
                        return self.counts;
                    }
                    assert!(Instant::now() < end, "{} lacks some of {all:?}", self.describe());
                } else if self.is_cut && Instant::now() >= cut {
                    break;
                }
                match socket.next_within(FRAME_MAX).await {
                    Ok(frame) if frame["op"] == 4 => break,
                    Ok(frame) => self.take(&frame),
                    Err(crate::socket::SocketEnd::Silence) => {}
                    Err(_) => break,
                }
            }
        }
    }

    /// Returns false if the socket ends before.
    async fn attach_all(&mut self, socket: &mut Socket) -> bool {
        for channel in self.channels.clone() {
            let serial = self.sequences.get(&channel).and_then(|sequence| sequence.serial.clone());
            let mut attach = json!({"op": 8, "id": channel, "channel": channel});
            if let Some(serial) = serial {
                attach["serial"] = serial;
            }
            if !socket.try_send(&attach).await {
                return false;
            }
            loop {
                match socket.next_within(SOON).await {
                    Ok(frame) if frame["op"] == 4 => return false,
                    Ok(frame) => {
                        let is_answer = frame["id"] == *channel;
                        assert!(!is_answer || frame["op"] == 9, "{frame}");
                        self.take(&frame);
                        if is_answer {
                            break;
                        }
                    }
                    // A stopped node does not answer.
                    Err(_) => return false,
                }
            }
        }
        true
    }

    fn take(&mut self, frame: &Value) {
        let channel = frame["channel"].as_str().unwrap_or_default();
        if frame["op"] != 9 && frame["op"] != 13 {
            return;
        }
        let text = frame.to_string();
        self.last.push(format!("{} {}", self.shared.at(), text.chars().take(240).collect::<String>()));
        if self.last.len() > 40 {
            self.last.remove(0);
        }
        let sequence = self.sequences.entry(channel.to_owned()).or_default();
        if frame["op"] == 9 {
            self.counts.attaches += 1;
            if sequence.serial.is_some() && frame["resumed"] == false {
                self.counts.losses += 1;
                sequence.report_loss(self.shared.acknowledged(channel));
            }
        }
        let (mut fault, mut old) = (None, None);
        for message in frame["messages"].as_array().into_iter().flatten() {
            let number = message["data"].as_u64().expect("a number");
            let is_in_doubt = self.shared.is_in_doubt(channel, number);
            let next = sequence.next;
            if let Some(age) = sequence.age_of_duplicate(number).filter(|_| !is_in_doubt) {
                self.counts.again += 1;
                if self.counts.oldest <= AGAIN_OLD && age > AGAIN_OLD {
                    old = Some(format!("{number} on {channel} comes once more after {age:?}"));
                }
                self.counts.oldest = self.counts.oldest.max(age);
            }
            match sequence.take(number, is_in_doubt) {
                Ok(missing) => self.counts.missing += missing,
                Err(what) => {
                    fault = fault.or(Some(format!("{what}: {number} on {channel}, {next:?} was next")))
                }
            }
        }
        sequence.serial = Some(frame["serial"].clone());
        if let Some(old) = old {
            println!("{old}, {}", self.describe());
        }
        if let Some(fault) = fault {
            unreachable!("{fault}\n{}", self.describe());
        }
    }

    fn has_all(&self, published: &[(String, u64)]) -> bool {
        published.iter().filter(|(channel, _)| self.channels.contains(channel)).all(|(channel, count)| {
            let sequence = self.sequences.get(channel);
            sequence.is_some_and(|sequence| sequence.is_loss_reported || sequence.next.unwrap_or(0) >= *count)
        })
    }

    fn describe(&self) -> String {
        format!("subscriber {} at {}:\n{}", self.number, self.shared.at(), self.last.join("\n"))
    }
}
