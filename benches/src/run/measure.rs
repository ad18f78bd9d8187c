//! Measurements and their order: the repetitions take turns, so that a drift of the machine hits all alike.

use std::path::PathBuf;

use super::Options;
use super::durable::Durable;
use super::generator::{load, result_of};
use super::report::{Fanout, Idle, Measurements, Presence, Publish};
use super::server::Server;
use crate::Result;
use crate::load::{FanoutOutcome, IdleOutcome};

const MESSAGE_BYTES: usize = 128;
/// Numbers of subscribers, with a rate of messages per second that makes about as many deliveries.
const FANOUTS: [(usize, u32); 2] = [(1_000, 20), (10_000, 2)];
const IDLE_CONNECTIONS: usize = 10_000;
const MEMBERS: usize = 1_000;
/// Numbers of members that are attached and receive every enter.
const WATCHING: [usize; 2] = [1_000, 100];

pub(super) struct Bench<'a> {
    pub(super) this: PathBuf,
    pub(super) node: PathBuf,
    pub(super) data: PathBuf,
    pub(super) options: &'a Options,
}

impl Bench<'_> {
    /// Measures all that can be measured, and gives the failures as text.
    pub(super) fn measure(&self) -> (Measurements, Vec<String>) {
        let mut measured = Measurements::default();
        let mut failures = Vec::new();
        for (subscribers, rate) in FANOUTS {
            match self.fanout(subscribers, rate) {
                Ok(fanout) => {
                    failures.extend(fanout.faults());
                    measured.fanouts.push(fanout);
                }
                Err(error) => failures.push(format!("fan-out × {subscribers}: {error}")),
            }
        }
        match self.idle() {
            Ok(idle) => measured.idle = Some(idle),
            Err(error) => failures.push(format!("idle connections: {error}")),
        }
        match self.publish() {
            Ok(publish) => measured.publish = Some(publish),
            Err(error) => failures.push(format!("durable publishes: {error}")),
        }
        for subscribers in WATCHING {
            match self.presence(subscribers) {
                Ok(presence) => measured.presences.push(presence),
                Err(error) => failures.push(format!("presence × {subscribers}: {error}")),
            }
        }
        (measured, failures)
    }

    fn fanout(&self, subscribers: usize, rate: u32) -> Result<Fanout> {
        let mut fanout = Fanout::new(subscribers, rate, MESSAGE_BYTES);
        for repetition in 1..=self.options.repetitions {
            self.say(&format!("fan-out × {subscribers}"), repetition);
            fanout.baseline.push(self.fan_out_over(&Server::baseline(&self.this, 0)?, subscribers, rate)?);
            let node = Server::node(&self.node, &self.data, "none", None)?;
            fanout.node.push(self.fan_out_over(&node, subscribers, rate)?);
        }
        Ok(fanout)
    }

    fn fan_out_over(&self, server: &Server, subscribers: usize, rate: u32) -> Result<FanoutOutcome> {
        let mut command = load(&self.this, "fanout", server);
        command.args(["--subscribers", &subscribers.to_string(), "--rate", &rate.to_string()]);
        command.args(["--seconds", &self.options.seconds.to_string(), "--bytes", &MESSAGE_BYTES.to_string()]);
        result_of(command)
    }

    fn idle(&self) -> Result<Idle> {
        let mut runs: Vec<IdleOutcome> = Vec::new();
        for repetition in 1..=self.options.repetitions {
            self.say("idle connections", repetition);
            let node = Server::node(&self.node, &self.data, "none", None)?;
            let mut command = load(&self.this, "idle", &node);
            command.args(["--connections", &IDLE_CONNECTIONS.to_string()]);
            runs.push(result_of(command)?);
        }
        Ok(Idle { runs })
    }

    fn publish(&self) -> Result<Publish> {
        let Self { this, node, data, options } = self;
        let durable = Durable { bench: this, node, data, seconds: options.seconds };
        let say = |repetition| self.say("durable publishes", repetition);
        let (publish, measured) = durable.measure(options.repetitions, say);
        measured.map(|()| publish)
    }

    fn presence(&self, subscribers: usize) -> Result<Presence> {
        let mut presence = Presence { members: MEMBERS, subscribers, runs: Vec::new() };
        for repetition in 1..=self.options.repetitions {
            self.say(&format!("presence × {subscribers}"), repetition);
            let node = Server::node(&self.node, &self.data, "none", None)?;
            let mut command = load(&self.this, "presence", &node);
            command.args(["--members", &MEMBERS.to_string(), "--subscribers", &subscribers.to_string()]);
            presence.runs.push(result_of(command)?);
        }
        Ok(presence)
    }

    fn say(&self, what: &str, repetition: u32) {
        eprintln!("bench: {what}, {repetition} of {}", self.options.repetitions);
    }
}
