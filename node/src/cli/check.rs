//! `fanfare check-config`, and the checks before a start: every mistake of the settings and of the files that they name.

mod folder;
#[cfg(test)]
mod tests;

use crate::accounts::{self, Accounts, DirectoryError};
use crate::app::{self, AdminToken};
use crate::cluster::ClusterKey;
use crate::cluster::link::{PeerFile, PeerFiles, PeerTls};
use crate::config::{Config, ConfigMistake, LoadedConfig};
use crate::model::Clock;
use crate::tls::{CertificateError, Certificates};

use super::failure::{CommandOutcome, Failure};
use super::output;

pub(super) fn run(loaded: LoadedConfig) -> Result<CommandOutcome, Failure> {
    let (config, warnings) = accepted(loaded)?;
    report(&warnings);
    let file = config.config_file.as_ref().map_or_else(String::new, |file| format!(" of {}", file.display()));
    output::print(&format!("the configuration{file} is good\n"))
}

/// The settings that a node may start with, and their warnings.
///
/// # Errors
/// All mistakes that prevent a start, at once.
pub(super) fn accepted(loaded: LoadedConfig) -> Result<(Config, Vec<ConfigMistake>), Failure> {
    let ConfigFindings { mistakes, warnings } = ConfigFindings::in_all(&loaded);
    if mistakes.is_empty() { Ok((loaded.config, warnings)) } else { Err(refused(&mistakes, &warnings)) }
}

/// The settings without a check of the files, for commands that need few of them. Warnings go to stderr.
pub(super) fn settings(loaded: LoadedConfig) -> Result<Config, Failure> {
    if !loaded.mistakes.is_empty() {
        return Err(refused(&loaded.mistakes, &loaded.warnings));
    }
    report(&loaded.warnings);
    Ok(loaded.config)
}

/// The failure with all mistakes and warnings: a warning may name the cause, such as a misspelt variable.
fn refused(mistakes: &[ConfigMistake], warnings: &[ConfigMistake]) -> Failure {
    let mistakes = mistakes.iter().map(ConfigMistake::to_string);
    let lines: Vec<_> = mistakes.chain(warnings.iter().map(warning)).collect();
    Failure::usage(lines.join("\n"))
}

fn warning(warning: &ConfigMistake) -> String {
    format!("warning: {warning}")
}

fn report(warnings: &[ConfigMistake]) {
    output::report_all(warnings.iter().map(warning).collect());
}

/// All findings about the given settings.
#[derive(Default)]
struct ConfigFindings {
    mistakes: Vec<ConfigMistake>,
    warnings: Vec<ConfigMistake>,
}

impl ConfigFindings {
    fn in_all(loaded: &LoadedConfig) -> Self {
        let mut found = Self { mistakes: loaded.mistakes.clone(), warnings: loaded.warnings.clone() };
        let config = &loaded.config;
        found.connections(config);
        found.data_dir(config);
        found.directory(config);
        found.certificate(config);
        found.admin_token(config);
        found.cluster_key(config);
        found.peer_files(config);
        found.password(config);
        found
    }

    fn mistake(&mut self, location: impl Into<String>, problem: impl ToString) {
        self.mistakes.push(ConfigMistake::new(location, problem.to_string()));
    }

    fn connections(&mut self, config: &Config) {
        let lowered = app::lowered_connections(&config.limits);
        self.warnings.extend(lowered.map(|problem| ConfigMistake::new("limits.connections", problem)));
        self.warnings
            .extend(app::short_backlog().map(|problem| ConfigMistake::new("net.core.somaxconn", problem)));
    }

    fn data_dir(&mut self, config: &Config) {
        if let Err(problem) = folder::may_be_written(&config.data_dir) {
            self.mistake("--data-dir", problem);
        }
    }

    /// Checks the directory file; a missing one is allowed only if the settings allow that.
    fn directory(&mut self, config: &Config) {
        let file = config.directory_file();
        if !file.exists() {
            return;
        }
        let at = |mistake: &accounts::DirectoryMistake| {
            let key = if mistake.key.is_empty() { String::new() } else { format!(": {}", mistake.key) };
            ConfigMistake::new(format!("{}:{}{key}", file.display(), mistake.line), mistake.reason.clone())
        };
        match Accounts::open_guarded(&file, config.limits.history_retention_hours, &config.webhook_allow) {
            Ok(accounts) => self.warnings.extend(accounts.current().warnings().iter().map(at)),
            Err(DirectoryError::Mistakes { mistakes, .. }) => self.mistakes.extend(mistakes.iter().map(at)),
            Err(DirectoryError::Unreadable { path, source }) => {
                self.mistake("--directory", format!("cannot read {}: {source}", path.display()));
            }
        }
    }

    fn certificate(&mut self, config: &Config) {
        let Some((certificate, key)) = config.tls_files() else { return };
        let opened: Result<_, CertificateError> = Certificates::open(certificate, key);
        if let Err(error) = opened {
            let flag = if error.path() == certificate { "--tls-cert" } else { "--tls-key" };
            self.mistake(flag, error);
        }
    }

    fn admin_token(&mut self, config: &Config) {
        let (location, read) = match &config.admin_token_file {
            Some(file) => ("--admin-token-file", AdminToken::read(file).map(Some)),
            None => ("--data-dir", AdminToken::kept_in(&config.data_dir)),
        };
        // A fault of the folder itself is reported already.
        let is_reported =
            location == "--data-dir" && self.mistakes.iter().any(|mistake| mistake.location == location);
        if let Err(error) = read
            && !is_reported
        {
            self.mistakes.push(ConfigMistake::because(location, &error));
        }
    }

    fn cluster_key(&mut self, config: &Config) {
        let opened = config.cluster_key_file.as_deref().map(ClusterKey::open);
        if let Some(Err(error)) = opened {
            self.mistake("--cluster-key-file", error);
        }
    }

    fn peer_files(&mut self, config: &Config) {
        let Some([certificate, key, ca]) = config.peer_files() else { return };
        if let Err(error) = PeerTls::open(PeerFiles { certificate, key, ca }, Clock::system().now_ms()) {
            let flag = match error.file {
                Some(PeerFile::Certificate) | None => "--peer-cert",
                Some(PeerFile::Key) => "--peer-key",
                Some(PeerFile::Ca) => "--peer-ca",
            };
            self.mistake(flag, error);
        }
    }

    fn password(&mut self, config: &Config) {
        let read = config.scylla_password_file.as_deref().map(app::read_password);
        if let Some(Err(error)) = read {
            self.mistake("--scylla-password-file", error);
        }
    }
}
