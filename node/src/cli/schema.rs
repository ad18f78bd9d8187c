//! `fanfare schema apply`: creates what the shared store needs in its database.

use super::failure::{CommandOutcome, Failure};
use super::output;
use super::runtime;
use crate::app;
use crate::config::{Config, StoreKind};

pub(super) fn apply(config: &Config) -> Result<CommandOutcome, Failure> {
    if config.store != StoreKind::Scylla {
        return Err(Failure::usage("only --store scylla has a schema"));
    }
    let applied = runtime::multi_thread(1)?.block_on(app::apply_schema(config));
    let is_new = applied.map_err(|error| Failure::because("schema apply", &error))?;
    let keyspace = &config.scylla_keyspace;
    output::print(&if is_new {
        format!("the keyspace {keyspace} is ready\n")
    } else {
        format!("the keyspace {keyspace} has everything already\n")
    })
}
