//! Durable publishes through the node, and the same rows written by the bare loop.

use std::path::Path;
use std::process::Command;

use super::generator::{load, result_of};
use super::report::Publish;
use super::server::Server;
use crate::Result;
use crate::load::PublishOutcome;

const CONNECTIONS: usize = 16;
/// Publishes under way per connection. The sum over the connections is the group of the bare loop.
const WINDOW: usize = 64;
const MESSAGE_BYTES: usize = 128;

/// Paths of the binaries, and a folder on the measured disk.
pub(super) struct Durable<'a> {
    pub(super) bench: &'a Path,
    pub(super) node: &'a Path,
    pub(super) data: &'a Path,
    pub(super) seconds: u32,
}

impl Durable<'_> {
    /// Measures the loop and the node in turn, `repetitions` times, until one of them fails.
    pub(super) fn measure(&self, repetitions: u32, say: impl Fn(u32)) -> (Publish, Result<()>) {
        let mut publish = Publish::new(CONNECTIONS, WINDOW, MESSAGE_BYTES);
        let measured = self.in_turn(repetitions, say, &mut publish);
        (publish, measured)
    }

    fn in_turn(&self, repetitions: u32, say: impl Fn(u32), publish: &mut Publish) -> Result<()> {
        for repetition in 1..=repetitions {
            say(repetition);
            publish.bare_loop.push(self.bare_loop()?);
            publish.node.push(self.node()?);
        }
        Ok(())
    }

    fn node(&self) -> Result<PublishOutcome> {
        let node = Server::node(self.node, self.data, "embedded", None)?;
        let mut command = load(self.bench, "publish", &node);
        command.args(["--connections", &CONNECTIONS.to_string(), "--window", &WINDOW.to_string()]);
        command.args(["--seconds", &self.seconds.to_string(), "--bytes", &MESSAGE_BYTES.to_string()]);
        result_of(command)
    }

    fn bare_loop(&self) -> Result<crate::store_loop::Outcome> {
        let folder = tempfile::Builder::new().prefix("loop-").tempdir_in(self.data)?;
        let mut command = Command::new(self.bench);
        command.arg("store-loop").arg("--folder").arg(folder.path());
        command.args(["--group", &(CONNECTIONS * WINDOW).to_string()]);
        command.args(["--seconds", &self.seconds.to_string()]);
        result_of(command)
    }
}
