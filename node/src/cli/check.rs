//! `fanfare check-config`. Mistakes of the configuration itself have been reported before this is reached.

use std::fmt::Write as _;

use super::failure::{Failure, Outcome};
use super::output;
use crate::accounts::{Accounts, DirectoryError};
use crate::config::Config;
use crate::tls::{CertificateError, Certificates};

pub(super) fn run(config: &Config) -> Result<Outcome, Failure> {
    directory(config)?;
    certificate(config)?;
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

/// Refuses a certificate or key that cannot be used.
pub(super) fn certificate(config: &Config) -> Result<(), Failure> {
    let Some((certificate, key)) = config.tls_files() else { return Ok(()) };
    Certificates::open(certificate, key).map(drop).map_err(|error: CertificateError| {
        let flag = if error.path() == certificate { "--tls-cert" } else { "--tls-key" };
        Failure::usage(format!("{flag}: {error}"))
    })
}
