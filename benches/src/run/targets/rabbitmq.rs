//! A broker for a measurement, started by the script of the cluster tests.

use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::super::companion::Companion;
use crate::Result;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../cluster-tests/rabbitmq/rabbitmq");

/// A running broker. Dropping it ends it, and so does the end of this process.
pub(super) struct RabbitMq {
    pub(super) amqp: String,
    pub(super) management: String,
    /// Process that ends the broker when it ends.
    keeper: Option<Companion>,
    _folder: TempDir,
}

impl RabbitMq {
    pub(super) fn start(data: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("rabbitmq-").tempdir_in(data)?;
        let mut keeper = Command::new("sh");
        keeper.args(["-c", "echo ready; cat >/dev/null; exec \"$0\" end --dir \"$1\"", SCRIPT]);
        keeper.arg(folder.path());
        let keeper = Some(Companion::start(keeper)?);
        let mut start = Command::new(SCRIPT);
        start.args(["start", "--dir"]).arg(folder.path()).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = start.output()?;
        if !output.status.success() {
            return Err(format!("RabbitMQ cannot be started: {}", output.status).into());
        }
        let urls = String::from_utf8(output.stdout)?;
        let (amqp, management) = urls.trim().split_once(' ').ok_or("the broker said no addresses")?;
        Ok(Self { amqp: amqp.to_owned(), management: management.to_owned(), keeper, _folder: folder })
    }
}

impl Drop for RabbitMq {
    fn drop(&mut self) {
        // The keeper reports itself why it could not end the broker.
        drop(self.keeper.take().map(Companion::end));
    }
}
