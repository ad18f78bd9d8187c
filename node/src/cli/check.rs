//! `fanfare check-config`: every mistake of the configuration and of the directory.

use std::fmt::Write as _;

use super::failure::{Failure, Outcome};
use super::output;
use crate::accounts::{Accounts, DirectoryError};
use crate::cluster::ClusterKey;
use crate::cluster::link::{PeerFile, PeerFiles, PeerTls};
use crate::config::{Config, ConfigError, Mistake};
use crate::model::Clock;
use crate::tls::{CertificateError, Certificates};

pub(super) fn run((config, mistakes): (Config, Vec<Mistake>)) -> Result<Outcome, Failure> {
    let own =
        if mistakes.is_empty() { Ok(()) } else { Err(Failure::usage(ConfigError(mistakes).to_string())) };
    let mut texts = Vec::new();
    for checked in [own, directory(&config), certificate(&config), cluster_key(&config), peer_files(&config)]
    {
        match checked {
            Ok(()) => {}
            Err(Failure::Usage(text)) => texts.push(text.trim_end().to_owned()),
            Err(failure) => return Err(failure),
        }
    }
    if !texts.is_empty() {
        return Err(Failure::usage(texts.join("\n")));
    }
    let file = config.config_file.as_ref().map_or_else(String::new, |file| format!(" of {}", file.display()));
    output::print(&format!("the configuration{file} is good\n"))
}

/// Refuses a directory file with all its mistakes. Where there is none, the configuration allows that.
pub(super) fn directory(config: &Config) -> Result<(), Failure> {
    let file = config.directory_file();
    if !file.exists() {
        return Ok(());
    }
    Accounts::open(&file, config.limits.history_retention_hours).map(drop).map_err(|error| match error {
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

/// Refuses a cluster key that cannot be used.
pub(super) fn cluster_key(config: &Config) -> Result<(), Failure> {
    let Some(file) = &config.cluster_key_file else { return Ok(()) };
    ClusterKey::open(file).map(drop).map_err(|error| Failure::usage(format!("--cluster-key-file: {error}")))
}

/// Refuses certificates for peers that cannot be used.
pub(super) fn peer_files(config: &Config) -> Result<(), Failure> {
    let Some([certificate, key, ca]) = config.peer_files() else { return Ok(()) };
    let opened = PeerTls::open(PeerFiles { certificate, key, ca }, Clock::system().now_ms());
    opened.map(drop).map_err(|error| {
        let flag = match error.file {
            Some(PeerFile::Certificate) | None => "--peer-cert",
            Some(PeerFile::Key) => "--peer-key",
            Some(PeerFile::Ca) => "--peer-ca",
        };
        Failure::usage(format!("{flag}: {error}"))
    })
}
