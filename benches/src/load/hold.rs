//! Connections that are attached and read, while another process measures.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use mio::{Events, Poll};
use serde::{Deserialize, Serialize};

use super::Target;
use super::link::Link;
use super::opening::open;
use crate::wire::reader::SHARED_BYTES;
use crate::{Result, os};

const GLANCE: Duration = Duration::from_millis(100);

#[derive(Args, Clone)]
pub struct Hold {
    #[command(flatten)]
    pub target: Target,
    /// Number of connections.
    #[arg(long)]
    pub connections: usize,
    /// Channels per connection.
    #[arg(long, default_value_t = 1)]
    pub attached: usize,
    /// Beginning of the channels' names; a number from 0 follows.
    #[arg(long, default_value = "bench:hold:")]
    pub prefix: String,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub channels: usize,
    /// Time until the last connection was attached.
    pub opening_s: f64,
    /// Number of frames that came afterwards.
    #[serde(rename = "heard")]
    pub received: u64,
}

impl Hold {
    /// Opens the connections, says in a line on stdout that all are attached, and holds them until stdin ends.
    pub fn run(&self) -> Result<Outcome> {
        let began = Instant::now();
        let links = open(&self.target, self.connections, |number| {
            let first = number * self.attached;
            (first..first + self.attached).map(|nth| format!("{}{nth}", self.prefix))
        })?;
        let opening_s = began.elapsed().as_secs_f64();
        println!("attached");
        let over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&over);
        thread::spawn(move || {
            // An error ends the wait, too.
            let _ = io::copy(&mut io::stdin(), &mut io::sink());
            stop.store(true, Ordering::Release);
        });
        let received = read_until(links, &over)?;
        Ok(Outcome { channels: self.connections * self.attached, opening_s, received })
    }
}

fn read_until(mut links: Vec<Link>, over: &AtomicBool) -> Result<u64> {
    let mut poll = Poll::new()?;
    for (at, link) in links.iter_mut().enumerate() {
        link.register(poll.registry(), at)?;
    }
    let mut events = Events::with_capacity(1024);
    let mut shared = vec![0; SHARED_BYTES];
    let mut received = 0;
    while !over.load(Ordering::Acquire) {
        match poll.poll(&mut events, Some(GLANCE)) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in events.iter().filter(|event| event.is_readable()) {
            let at = event.token().0;
            let read = links[at].read(os::monotonic_ns(), &mut shared, |_| received += 1);
            read.map_err(|error| format!("connection {at} was lost: {error}"))?;
        }
    }
    Ok(received)
}
