//! Members that enter one channel while a part of them watch, then clients that attach and get the list of members.

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use mio::{Events, Poll};
use serde::{Deserialize, Serialize};

use super::link::Link;
use super::opening::open;
use super::{Cost, Meter, Target};
use crate::wire::frames::{self, op};
use crate::{Result, os};

const CHANNEL: &str = "bench:presence";
/// Size of the buffer: a page of the list is 64 KiB without its head.
const SHARED_BYTES: usize = 128 * 1024;
/// Time without any frame after which the measurement fails.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Args, Clone)]
pub struct Presence {
    #[command(flatten)]
    pub target: Target,
    /// Number of connections that enter, each under a name of its own.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub members: u32,
    /// Number of members that are attached and receive the events; the others only enter.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub subscribers: u32,
    /// Number of clients that attach one after another once all members have entered, each after a change.
    #[arg(long, default_value_t = 100)]
    pub newcomers: u32,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub members: usize,
    pub subscribers: usize,
    pub newcomers: usize,
    /// Cost of entering: each enter is delivered to all subscribers.
    pub entering: Cost,
    /// Payload bytes that the server sent to the subscribers meanwhile.
    pub sent_bytes: u64,
    /// Payload bytes that it had to send: each event once to each subscriber.
    pub needed_bytes: u64,
    /// CPU of the server per new client, in ms: connecting, attaching and sending the list, which is encoded for each.
    pub newcomer_cpu_ms: f64,
    pub newcomer_ms: f64,
    pub list_bytes: u64,
}

impl Presence {
    pub fn run(&self) -> Result<Outcome> {
        let (members, subscribers) = (self.members as usize, self.subscribers.min(self.members) as usize);
        let attached = |number| (number < subscribers).then(|| CHANNEL.to_owned());
        let mut crowd = PresenceConnections::new(open(&self.target, members, attached)?, subscribers)?;
        let everyone: Vec<usize> = (0..members).collect();
        let meter = Meter::start(&self.target.server_pids)?;
        let (sent_bytes, event_bytes) = crowd.change("enter", &everyone)?;
        let entering = meter.stop()?;
        let (mut list_bytes, mut cpu_s, mut wall_s) = (0, 0.0, 0.0);
        let mut newcomers = Vec::new();
        for number in 0..self.newcomers as usize {
            // The list that the node encoded for the client before is out of date now.
            crowd.change("update", &[number % members])?;
            let meter = Meter::start(&self.target.server_pids)?;
            let newcomer = open(&self.target, 1, |_| Some(CHANNEL.to_owned()))?;
            let mut newcomer = PresenceConnections::new(newcomer, 1)?;
            list_bytes = newcomer.list(members).map_err(|error| format!("newcomer {number}: {error}"))?;
            let cost = meter.stop()?;
            (cpu_s, wall_s) = (cpu_s + cost.server_cpu_s, wall_s + cost.wall_s);
            newcomers.push(newcomer);
        }
        let each_ms = |seconds: f64| seconds * 1000.0 / newcomers.len().max(1) as f64;
        Ok(Outcome {
            members,
            subscribers,
            newcomers: newcomers.len(),
            entering,
            sent_bytes,
            needed_bytes: event_bytes * subscribers as u64,
            newcomer_cpu_ms: each_ms(cpu_s),
            newcomer_ms: each_ms(wall_s),
            list_bytes,
        })
    }
}

/// The connections, of which the first `subscribers` are attached.
struct PresenceConnections {
    links: Vec<Link>,
    subscribers: usize,
    poll: Poll,
    shared: Vec<u8>,
}

impl PresenceConnections {
    fn new(mut links: Vec<Link>, subscribers: usize) -> Result<Self> {
        let poll = Poll::new()?;
        for (at, link) in links.iter_mut().enumerate() {
            link.register(poll.registry(), at)?;
        }
        Ok(Self { links, subscribers, poll, shared: vec![0; SHARED_BYTES] })
    }

    /// Changes these members and waits until every subscriber has received the events. Gives the bytes that were sent
    /// to all subscribers, and those that one of them had to get.
    fn change(&mut self, action: &str, members: &[usize]) -> Result<(u64, u64)> {
        for at in members {
            let frame = frames::presence(*at as u64, CHANNEL, action, &format!("member-{at}"));
            self.links[*at].send(&frame)?;
        }
        let subscribers = self.subscribers;
        let (mut sent_bytes, mut event_bytes) = (0, 0);
        let (mut events, mut acks) = (0, 0);
        let mut seen = vec![0; subscribers];
        self.read_until(|at, text| {
            let watches = at < subscribers;
            sent_bytes += if watches { text.len() as u64 } else { 0 };
            match frames::op(text) {
                Some(op::PRESENCE) if watches => {
                    event_bytes += if at == 0 { text.len() as u64 } else { 0 };
                    events += 1;
                    seen[at] += 1;
                    if seen[at] > members.len() {
                        return Err(format!("subscriber {at} was sent an event twice").into());
                    }
                }
                Some(op::ACK) => acks += 1,
                Some(op::HEARTBEAT) => {}
                _ => return Err(format!("unexpected: {}", String::from_utf8_lossy(text)).into()),
            }
            Ok(events >= subscribers * members.len() && acks >= members.len())
        })?;
        Ok((sent_bytes, event_bytes))
    }

    /// Reads the list, which must have `members` members, and gives its size in bytes.
    fn list(&mut self, members: usize) -> Result<u64> {
        let (mut found, mut bytes) = (0, 0);
        self.read_until(|_, text| {
            if frames::op(text) == Some(op::SYNC) {
                bytes += text.len() as u64;
                found += text.windows(10).filter(|part| part == b"\"clientId\"").count();
            }
            Ok(text.ends_with(b"\"more\":false}"))
        })?;
        if found != members {
            return Err(format!("{found} of {members} members were sent").into());
        }
        Ok(bytes)
    }

    /// Passes every frame with the number of its connection to `take`, until that returns true.
    fn read_until(&mut self, mut take: impl FnMut(usize, &[u8]) -> Result<bool>) -> Result<()> {
        let mut events = Events::with_capacity(1024);
        let mut last_received = Instant::now();
        let mut taken = Ok(false);
        loop {
            match self.poll.poll(&mut events, Some(Duration::from_millis(50))) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in &events {
                let at = event.token().0;
                let link = &mut self.links[at];
                link.flush()?;
                link.read(os::monotonic_ns(), &mut self.shared, |text| {
                    last_received = Instant::now();
                    if matches!(taken, Ok(false)) {
                        taken = take(at, text);
                    }
                })?;
            }
            match taken {
                Ok(false) if last_received.elapsed() > PATIENCE => {
                    return Err(format!("nothing came for {PATIENCE:?}").into());
                }
                Ok(false) => {}
                ended => return ended.map(drop),
            }
        }
    }
}
