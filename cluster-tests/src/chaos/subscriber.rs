//! A client that reads, reconnects to a random node now and then, and checks the order of the messages.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::{AGAIN, Dice, Shared};
use crate::{SOON, Socket};

/// A client that cuts its link does so after a time between these.
const CUT_AFTER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
const FRAME_MAX: Duration = Duration::from_millis(200);
/// A client has all messages this long after the last publish.
const LAST_MAX: Duration = Duration::from_secs(40);

pub(super) struct Subscriber {
    number: usize,
    channels: Vec<String>,
    dice: Dice,
    is_cut: bool,
    shared: Arc<Shared>,
    places: HashMap<String, Place>,
    heard: Heard,
    /// The last frames, for the message of a failed test.
    last: Vec<String>,
}

#[derive(Debug, Default)]
pub(super) struct Heard {
    pub(super) attaches: u64,
    pub(super) told: u64,
    pub(super) missing: u64,
}

/// The state of one channel.
#[derive(Debug, Default)]
struct Place {
    serial: Option<Value>,
    /// The next number. A client accepts any first number.
    next: Option<u64>,
    /// A `resumed: false` has come since the last message.
    is_told: bool,
    has: BTreeSet<u64>,
    /// Numbers that a gap after a `resumed: false` skipped. They may come late.
    lost: BTreeSet<u64>,
}

impl Place {
    fn tell(&mut self) {
        self.is_told = true;
        // A client begins anew then, and may receive older messages again.
        self.has.clear();
    }

    /// Returns the number of messages that a told gap skipped, or the broken invariant.
    fn take(&mut self, number: u64, is_unsure: bool) -> Result<u64, &'static str> {
        if self.has.contains(&number) {
            return if is_unsure { Ok(0) } else { Err("came twice") };
        }
        let next = self.next.unwrap_or(number);
        if number < next && !self.is_told {
            // A late message of a told gap, or a second attempt under the same id.
            return if self.lost.remove(&number) || is_unsure { Ok(0) } else { Err("came late") };
        }
        if number > next && !self.is_told {
            return Err("silent gap");
        }
        self.lost.extend(next..number);
        self.has.insert(number);
        (self.next, self.is_told) = (Some(number + 1), false);
        Ok(number.saturating_sub(next))
    }
}

impl Subscriber {
    pub(super) fn new(
        number: usize,
        channels: Vec<String>,
        dice: Dice,
        is_cut: bool,
        shared: Arc<Shared>,
    ) -> Self {
        let (places, heard, last) = (HashMap::new(), Heard::default(), Vec::new());
        Self { number, channels, dice, is_cut, shared, places, heard, last }
    }

    /// Runs until the client has all messages. `published` holds their numbers at the end of the course.
    pub(super) async fn run(mut self, published: watch::Receiver<Option<Vec<(String, u64)>>>) -> Heard {
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
                        return self.heard;
                    }
                    assert!(Instant::now() < end, "{} lacks some of {all:?}", self.describe());
                } else if self.is_cut && Instant::now() >= cut {
                    break;
                }
                match socket.next_within(FRAME_MAX).await {
                    Ok(frame) if frame["op"] == 4 => break,
                    Ok(frame) => self.take(&frame),
                    Err(crate::socket::Ended::Silence) => {}
                    Err(_) => break,
                }
            }
        }
    }

    /// Returns false if the socket ends before.
    async fn attach_all(&mut self, socket: &mut Socket) -> bool {
        for channel in self.channels.clone() {
            let serial = self.places.get(&channel).and_then(|place| place.serial.clone());
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
        let place = self.places.entry(channel.to_owned()).or_default();
        if frame["op"] == 9 {
            self.heard.attaches += 1;
            if place.serial.is_some() && frame["resumed"] == false {
                self.heard.told += 1;
                place.tell();
            }
        }
        let mut fault = None;
        for message in frame["messages"].as_array().into_iter().flatten() {
            let number = message["data"].as_u64().expect("a number");
            let is_unsure = self.shared.is_unsure(channel, number);
            let next = place.next;
            match place.take(number, is_unsure) {
                Ok(missing) => self.heard.missing += missing,
                Err(what) => {
                    fault = fault.or(Some(format!("{what}: {number} on {channel}, {next:?} was next")))
                }
            }
        }
        place.serial = Some(frame["serial"].clone());
        if let Some(fault) = fault {
            unreachable!("{fault}\n{}", self.describe());
        }
    }

    fn has_all(&self, published: &[(String, u64)]) -> bool {
        published.iter().filter(|(channel, _)| self.channels.contains(channel)).all(|(channel, count)| {
            let place = self.places.get(channel);
            place.is_some_and(|place| place.is_told || place.next.unwrap_or(0) >= *count)
        })
    }

    fn describe(&self) -> String {
        format!("subscriber {} at {}:\n{}", self.number, self.shared.at(), self.last.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the messages that a told gap skipped, for these numbers; `None` is a `resumed: false`.
    fn found(numbers: &[Option<u64>]) -> Result<u64, &'static str> {
        let mut place = Place::default();
        let mut missing = 0;
        for number in numbers {
            match number {
                Some(number) => missing += place.take(*number, false)?,
                None => place.tell(),
            }
        }
        Ok(missing)
    }

    #[test]
    fn what_may_not_happen_is_found() {
        assert_eq!(found(&[Some(4), Some(5), Some(6)]), Ok(0));
        assert_eq!(found(&[Some(4), Some(6)]), Err("silent gap"));
        assert_eq!(found(&[Some(4), Some(5), Some(5)]), Err("came twice"));
        assert_eq!(found(&[Some(4), Some(3)]), Err("came late"));
    }

    #[test]
    fn who_was_told_begins_anew_and_counts_what_is_missing() {
        assert_eq!(found(&[Some(4), None, Some(7), Some(8)]), Ok(2));
        assert_eq!(found(&[Some(4), None, Some(7), Some(6)]), Ok(2), "it comes late, and was told");
        assert_eq!(found(&[Some(4), Some(5), None, Some(4), Some(5)]), Ok(0));
        assert_eq!(found(&[Some(4), None, Some(7), Some(9)]), Err("silent gap"));
    }

    #[test]
    fn what_was_published_again_under_its_id_may_come_twice() {
        let mut place = Place::default();
        assert_eq!(place.take(0, false), Ok(0));
        assert_eq!(place.take(1, true), Ok(0));
        assert_eq!(place.take(1, true), Ok(0));
        assert_eq!(place.take(2, false), Ok(0));
    }
}
