//! `fanfare check-config`. Mistakes of the configuration itself have been reported before this is reached.

use std::fmt::Write as _;

use super::failure::{Failure, Outcome};
use super::output;
use crate::accounts::{Accounts, DirectoryError};
use crate::config::Config;

pub(super) fn run(config: &Config) -> Result<Outcome, Failure> {
    directory(config)?;
    let file = config.config_file.as_ref().map_or_else(String::new, |file| format!(" of {}", file.display()));
    output::print(&format!("the configuration{file} is good\n"))
}

/// Refuses a directory file with all its mistakes. Where there is none, the configuration allows that.
pub(super) fn directory(config: &Config) -> Result<(), Failure> {
    let file = config.directory_file();
    if !file.exists() {
        return Ok(());
    }
    Accounts::open(&file).map(drop).map_err(|error| match error {
        DirectoryError::Mistakes { path, mistakes } => {
            let mut text = String::new();
            for mistake in mistakes {
                let key = if mistake.key.is_empty() { String::new() } else { format!("{}: ", mistake.key) };
                writeln!(text, "{}:{}: {key}{}", path.display(), mistake.line, mistake.reason)
                    .expect("a string takes all text");
            }
            Failure::usage(text)
        }
        DirectoryError::Unreadable { path, source } => {
            Failure::usage(format!("--directory: cannot read {}: {source}", path.display()))
        }
    })
}
