//! The client library over a link that is cut again and again, while a socket publishes as fast as it can.

use std::collections::VecDeque;
use std::time::Duration;

use fanfare_client::{Client, Credential, Draft, Ending, Event, Options, Reconnect};
use fanfare_cluster_tests::Proxy;
use fanfare_cluster_tests::waits::pace;
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::*;

/// Length of the test, in seconds, unless the environment sets another one.
const SECONDS: u64 = 15;
const CHANNEL: &str = "fast";
/// Greatest time from one event of the client to the next.
const SILENCE_MAX: Duration = Duration::from_secs(20);

fn duration() -> Duration {
    let asked = std::env::var("FANFARE_CONTINUITY_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(SECONDS))
}

/// Gives a random time from 50 to 500 ms.
fn moment() -> Duration {
    let mut bytes = [0; 2];
    getrandom::fill(&mut bytes).expect("random bytes");
    Duration::from_millis(50 + u64::from(u16::from_be_bytes(bytes)) % 450)
}

/// Publishes numbers one after another, many under way at once, until the time is over; gives their count.
async fn flood(publisher: &mut Socket, until: Instant) -> u64 {
    const UNDER_WAY: u64 = 200;
    let (mut sent, mut acked) = (0, 0);
    while acked < sent || Instant::now() < until {
        while sent < acked + UNDER_WAY && Instant::now() < until {
            publisher.start(json!({"op": 13, "channel": CHANNEL, "data": sent})).await;
            sent += 1;
        }
        if acked < sent {
            let frame = publisher.next().await;
            assert_eq!(frame["op"], 1, "{frame}");
            acked += 1;
        }
    }
    sent
}

/// Publishes as [`flood`] does, and then a number now and then: a subscriber after a continuity loss receives only
/// later messages.
async fn publish_until_seen(mut publisher: Socket, until: Instant, mut seen: watch::Receiver<u64>) -> u64 {
    let published = flood(&mut publisher, until).await;
    let deadline = Instant::now() + SILENCE_MAX;
    for number in published.. {
        publisher.publish(CHANNEL, json!({"data": number})).await;
        let is_seen = seen.wait_for(|next| *next >= published);
        if timeout(Duration::from_millis(100), is_seen).await.is_ok() {
            break;
        }
        assert!(Instant::now() < deadline, "waited in vain for number {published} to be seen");
    }
    published
}

async fn cut_again_and_again(proxy: Proxy, until: Instant) -> Proxy {
    while Instant::now() < until {
        pace(moment()).await;
        proxy.cut();
    }
    proxy
}

/// Numbers that a client has received.
#[derive(Default, Debug)]
struct ReceivedTrace {
    /// Next number.
    next: u64,
    /// Whether numbers may be missing before the next one, after a reported loss.
    may_miss: bool,
    seen: u64,
    missing: u64,
    resumed: u64,
    lost: u64,
    slow: u64,
}

impl ReceivedTrace {
    fn take(&mut self, event: Event) {
        match event {
            Event::Messages(delivery) => {
                for message in &delivery.messages {
                    let data = message.data.as_ref().expect("data").get();
                    let number: u64 = data.parse().expect("a number");
                    let fits = number == self.next || (self.may_miss && number > self.next);
                    assert!(fits, "{number} after {self:?}");
                    self.missing += number - self.next;
                    self.next = number + 1;
                    self.may_miss = false;
                    self.seen += 1;
                }
            }
            Event::Attached(attached) if attached.resumed => self.resumed += 1,
            Event::Attached(_) => {
                self.lost += 1;
                self.may_miss = true;
            }
            // The node ends the link of a client that reads too slowly.
            Event::Disconnected { ending: Ending::Disconnected { .. }, .. } => self.slow += 1,
            Event::Disconnected { .. } | Event::Connected(_) => {}
            other => unreachable!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn client_gets_each_message_once_in_order_or_continuity_loss() {
    let node = Node::start(NodeOptions::default().limit("publishes_per_second", 0)).await;
    let proxy = Proxy::to(node.addr()).await;
    let reconnect = Reconnect { delay_min: Duration::from_millis(50), delay_max: Duration::from_millis(500) };
    let options = Options::new(proxy.url(), Credential::Key(node.key()));
    let options = Options { reconnect: Some(reconnect), ..options };
    let mut client = Client::connect(options).await.expect("connected");
    client.attach(CHANNEL).await.expect("attached");

    let until = Instant::now() + duration();
    let (seen, watching) = watch::channel(0);
    let mut publishing = JoinSet::new();
    publishing.spawn(publish_until_seen(Socket::open(&node, "").await, until, watching));
    let mut cutting = JoinSet::new();
    cutting.spawn(cut_again_and_again(proxy, until));

    let mut sight = ReceivedTrace::default();
    loop {
        let event = tokio::select! {
            biased;
            published = publishing.join_next() => {
                println!("published {}", published.expect("a publisher").expect("it ends well"));
                break;
            }
            event = timeout(SILENCE_MAX, client.next()) => event,
        };
        sight.take(event.unwrap_or_else(|_| unreachable!("nothing came: {sight:?}")).expect("it goes on"));
        seen.send_replace(sight.next);
    }
    println!("{sight:?}");
    let times = sight.resumed + sight.lost;
    assert!(times >= duration().as_secs(), "the link was cut often enough: {sight:?}");
    assert!(sight.resumed * 2 >= times, "a fair share resumed: {sight:?}");
    assert!(sight.lost > 0 || sight.missing == 0, "{sight:?}");
}

/// Publishes numbers over all link failures, many under way at once. After `until` it publishes one now and then, until
/// the subscriber has all that was published by then. Gives the count at `until`.
async fn publish_over_all(publisher: Client, until: Instant, seen: watch::Receiver<u64>) -> u64 {
    const UNDER_WAY: usize = 200;
    let (mut under_way, mut published, deadline) = (VecDeque::new(), 0, until + SILENCE_MAX);
    for number in 0.. {
        let data = RawValue::from_string(number.to_string()).expect("a number is JSON");
        let draft = Draft { data: Some(data), ..Draft::default() };
        under_way.push_back(publisher.publish_start(CHANNEL, vec![draft]).await.expect("sent"));
        if Instant::now() < until {
            published = number + 1;
        } else {
            pace(Duration::from_millis(100)).await;
        }
        while under_way.len() >= if published == number + 1 { UNDER_WAY } else { 1 } {
            under_way.pop_front().expect("not empty").await.expect("stored");
        }
        if published <= number && *seen.borrow() >= published {
            break;
        }
        assert!(Instant::now() < deadline, "waited in vain for number {published} to be seen");
    }
    published
}

/// Cuts the first link at random moments, and kills the node every few seconds.
async fn cut_and_kill(node: &mut Node, links: [Proxy; 2], until: Instant) -> ([Proxy; 2], u64) {
    const KILL_AFTER: Duration = Duration::from_secs(4);
    let (mut kill_at, mut kills) = (Instant::now() + KILL_AFTER, 0);
    while Instant::now() < until {
        pace(moment()).await;
        links[0].cut();
        if Instant::now() >= kill_at {
            links.iter().for_each(Proxy::turn_away);
            node.restart().await;
            for link in &links {
                link.turn_to(node.addr());
            }
            kill_at = Instant::now() + KILL_AFTER;
            kills += 1;
        }
    }
    (links, kills)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_is_seen_once_and_in_order_also_over_restarts() {
    const SECONDS: u64 = 17;
    let mut node = Node::start(NodeOptions::default().limit("publishes_per_second", 0)).await;
    let links = [Proxy::to(node.addr()).await, Proxy::to(node.addr()).await];
    let reconnect = Reconnect { delay_min: Duration::from_millis(20), delay_max: Duration::from_millis(200) };
    let client = async |link: &Proxy| {
        let options = Options::new(link.url(), Credential::Key(node.key()));
        Client::connect(Options { reconnect: Some(reconnect), ..options }).await.expect("connected")
    };
    let (mut subscriber, publisher) = (client(&links[0]).await, client(&links[1]).await);
    subscriber.attach(CHANNEL).await.expect("attached");

    let until = Instant::now() + Duration::from_secs(SECONDS);
    let (seen, watching) = watch::channel(0);
    let mut publishing = JoinSet::new();
    publishing.spawn(publish_over_all(publisher, until, watching));
    let (cutting, mut cut) = (cut_and_kill(&mut node, links, until), None);
    tokio::pin!(cutting);

    let mut sight = ReceivedTrace::default();
    let published = loop {
        let event = tokio::select! {
            biased;
            published = publishing.join_next() => break published.expect("a publisher").expect("it ends well"),
            ended = &mut cutting, if cut.is_none() => {
                cut = Some(ended);
                continue;
            }
            event = timeout(SILENCE_MAX, subscriber.next()) => event,
        };
        sight.take(event.unwrap_or_else(|_| unreachable!("nothing came: {sight:?}")).expect("it goes on"));
        seen.send_replace(sight.next);
    };
    let (_links, kills) = match cut {
        Some(ended) => ended,
        None => cutting.await,
    };
    println!("published {published}, {kills} restarts, {sight:?}");
    let times = sight.resumed + sight.lost;
    assert!(kills >= 2 && times >= SECONDS, "cut and killed often enough: {kills}, {sight:?}");
    assert!(sight.lost < kills, "most were resumed, over restarts too: {sight:?}");
    assert!(sight.lost > 0 || sight.missing == 0, "{sight:?}");
}
