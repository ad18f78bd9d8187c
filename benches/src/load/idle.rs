//! Connections that are attached to channels of their own and receive no messages.

use std::io;
use std::time::{Duration, Instant};

use clap::Args;
use mio::{Events, Poll};
use serde::{Deserialize, Serialize};

use super::link::{Frames, Link};
use super::opening::open;
use super::{Cost, Meter, Target};
use crate::wire::reader::SHARED_BYTES;
use crate::{NotCarried, Result, os, procfs};

#[derive(Args, Clone)]
pub struct Idle {
    #[command(flatten)]
    pub target: Target,
    /// Number of connections.
    #[arg(long)]
    pub connections: usize,
    /// Number of channels per connection, each with this subscriber alone.
    #[arg(long, default_value_t = 1)]
    pub attached: usize,
    /// Seconds for which the connections are held before the memory is read.
    #[arg(long, default_value_t = 5)]
    pub settle_seconds: u64,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub connections: usize,
    /// Growth of the server's resident memory, in bytes per connection.
    pub resident_bytes: f64,
    /// Growth of all TCP buffers of the machine, both ends together, in bytes per connection.
    pub socket_bytes: f64,
    /// Cost of opening and attaching all connections.
    pub opening: Cost,
    /// Cost of holding them.
    pub holding: Cost,
    /// Frames per connection while they were held: from the server, then to it.
    #[serde(rename = "heard")]
    pub received: f64,
    #[serde(rename = "said")]
    pub sent: f64,
}

impl Idle {
    pub fn run(&self) -> Result<Outcome> {
        let servers = &self.target.server_pids;
        let (resident_before, socket_before) = (procfs::resident_bytes_of(servers)?, procfs::socket_bytes()?);
        let meter = Meter::start(servers)?;
        let links = open(&self.target, self.connections, |number| {
            (0..self.attached).map(move |nth| format!("bench:idle:{number}:{nth}"))
        })?;
        let frames_before = frames(&links);
        let opening = meter.stop()?;
        let meter = Meter::start(servers)?;
        let links = hold(links, Duration::from_secs(self.settle_seconds))?;
        let holding = meter.stop()?;
        let frames_after = frames(&links);
        let (resident, socket) = (procfs::resident_bytes_of(servers)?, procfs::socket_bytes()?);
        let connections = links.len();
        let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / connections as f64;
        Ok(Outcome {
            connections,
            resident_bytes: each(resident_before, resident),
            socket_bytes: each(socket_before, socket),
            opening,
            holding,
            received: each(frames_before.received, frames_after.received),
            sent: each(frames_before.sent, frames_after.sent),
        })
    }
}

fn frames(links: &[Link]) -> Frames {
    links.iter().map(Link::frames).fold(Frames::default(), |sum, each| Frames {
        received: sum.received + each.received,
        sent: sum.sent + each.sent,
    })
}

/// Answers heartbeats for the time; a connection that ends meanwhile is an error.
fn hold(mut links: Vec<Link>, time: Duration) -> Result<Vec<Link>> {
    let mut poll = Poll::new()?;
    for (at, link) in links.iter_mut().enumerate() {
        link.register(poll.registry(), at)?;
    }
    let until = Instant::now() + time;
    let mut events = Events::with_capacity(1024);
    let mut shared = vec![0; SHARED_BYTES];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(links);
        }
        match poll.poll(&mut events, Some(left)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in events.iter().filter(|event| event.is_readable()) {
            let at = event.token().0;
            let read = links[at].read(os::monotonic_ns(), &mut shared, |_| {});
            read.map_err(|error| NotCarried(format!("idle connection {at} was lost: {error}")))?;
        }
    }
}
