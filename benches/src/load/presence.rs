//! A crowd that becomes present on one channel while all of it watches, then newcomers that are sent the list.

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
/// Room for a page of the list, which is 64 KiB without its head.
const SHARED_BYTES: usize = 128 * 1024;
/// Nothing at all for so long ends the measurement.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Args, Clone)]
pub struct Presence {
    #[command(flatten)]
    pub target: Target,
    /// Connections that are attached and enter, each under a name of its own.
    #[arg(long, default_value_t = 1_000)]
    pub members: usize,
    /// Connections that attach one after another once all are present.
    #[arg(long, default_value_t = 100)]
    pub newcomers: usize,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub members: usize,
    pub newcomers: usize,
    /// All entering, each of them seen by all.
    pub entering: Cost,
    /// What the members were sent meanwhile, in payload bytes.
    pub sent_bytes: u64,
    /// What they have to be sent: each event once to each.
    pub needed_bytes: u64,
    /// Opening a connection, attaching it and sending it the list, per newcomer.
    pub newcomer_cpu_ms: f64,
    pub newcomer_ms: f64,
    pub list_bytes: u64,
}

impl Presence {
    pub fn run(&self) -> Result<Outcome> {
        let mut crowd = Crowd::new(open(&self.target, self.members, |_| Some(CHANNEL.to_owned()))?)?;
        let meter = Meter::start(self.target.server_pid)?;
        for (number, link) in crowd.links.iter_mut().enumerate() {
            link.send(&frames::enter(number as u64, CHANNEL, &format!("member-{number}")))?;
        }
        let (mut sent_bytes, mut needed_bytes) = (0, 0);
        let (mut events, mut acks) = (0, 0);
        let (all_events, all_acks) = (self.members * self.members, self.members);
        let mut seen = vec![0; self.members];
        crowd.read_until(|at, text| {
            sent_bytes += text.len() as u64;
            match frames::op(text) {
                Some(op::PRESENCE) => {
                    needed_bytes += text.len() as u64;
                    events += 1;
                    seen[at] += 1;
                    if seen[at] > self.members {
                        return Err(format!("member {at} was sent an event twice").into());
                    }
                }
                Some(op::ACK) => acks += 1,
                Some(op::HEARTBEAT) => {}
                _ => return Err(format!("unexpected: {}", String::from_utf8_lossy(text)).into()),
            }
            Ok(events >= all_events && acks >= all_acks)
        })?;
        let entering = meter.stop()?;

        let meter = Meter::start(self.target.server_pid)?;
        let mut list_bytes = 0;
        let mut newcomers = Vec::new();
        for number in 0..self.newcomers {
            let mut newcomer = Crowd::new(open(&self.target, 1, |_| Some(CHANNEL.to_owned()))?)?;
            let (mut members, mut bytes) = (0, 0);
            newcomer.read_until(|_, text| {
                if frames::op(text) == Some(op::SYNC) {
                    bytes += text.len() as u64;
                    members += text.windows(10).filter(|part| part == b"\"clientId\"").count();
                }
                Ok(text.ends_with(b"\"more\":false}"))
            })?;
            if members != self.members {
                return Err(
                    format!("newcomer {number} was sent {members} of {} members", self.members).into()
                );
            }
            list_bytes = bytes;
            newcomers.push(newcomer);
        }
        let cost = meter.stop()?;
        let each_ms = |seconds: f64| seconds * 1000.0 / self.newcomers.max(1) as f64;
        Ok(Outcome {
            members: self.members,
            newcomers: self.newcomers,
            entering,
            sent_bytes,
            needed_bytes,
            newcomer_cpu_ms: each_ms(cost.server_cpu_s),
            newcomer_ms: each_ms(cost.wall_s),
            list_bytes,
        })
    }
}

struct Crowd {
    links: Vec<Link>,
    poll: Poll,
    shared: Vec<u8>,
}

impl Crowd {
    fn new(mut links: Vec<Link>) -> Result<Self> {
        let poll = Poll::new()?;
        for (at, link) in links.iter_mut().enumerate() {
            link.register(poll.registry(), at)?;
        }
        Ok(Self { links, poll, shared: vec![0; SHARED_BYTES] })
    }

    /// Hands over every frame, with the number of its connection, until `take` says that it was the last.
    fn read_until(&mut self, mut take: impl FnMut(usize, &[u8]) -> Result<bool>) -> Result<()> {
        let mut events = Events::with_capacity(1024);
        let mut heard = Instant::now();
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
                    heard = Instant::now();
                    if matches!(taken, Ok(false)) {
                        taken = take(at, text);
                    }
                })?;
            }
            match taken {
                Ok(false) if heard.elapsed() > PATIENCE => {
                    return Err(format!("nothing came for {PATIENCE:?}").into());
                }
                Ok(false) => {}
                ended => return ended.map(drop),
            }
        }
    }
}
