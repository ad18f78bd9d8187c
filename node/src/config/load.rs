//! Defaults, then the file, then the environment, then the flags.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::Config;
use super::error::{ConfigError, ConfigMistake};
use super::file;
use super::flags::Flags;
use super::nearest::nearest;
use super::rules::{self, SettingSources};
use super::settings::{Setting, settings};

/// Variables of the client commands.
const CLIENT_VARIABLES: [&str; 3] = ["FANFARE_KEY", "FANFARE_TOKEN", "FANFARE_URL"];

/// The settings that were given, with all mistakes and warnings.
#[derive(Debug)]
pub struct LoadedConfig {
    /// Configuration, as far as it could be read.
    pub config: Config,
    /// Mistakes, which prevent a start even if a stronger source overrides the setting.
    pub mistakes: Vec<ConfigMistake>,
    /// Warnings, which a starting node logs.
    pub warnings: Vec<ConfigMistake>,
}

impl LoadedConfig {
    /// Reads the file that the flags or the environment name, and merges all three sources.
    pub fn of(flags: &Flags, environment: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let mut loading = ConfigLoader::default();
        let variables = variables(environment, &mut loading);
        if let Some((location, path)) = config_file(flags, &variables) {
            let name = path.display().to_string();
            match std::fs::read_to_string(&path) {
                Ok(text) => loading.apply_file(&name, &text),
                Err(error) => {
                    loading
                        .mistakes
                        .push(ConfigMistake::new(location, format!("cannot read {name}: {error}")));
                }
            }
        }
        for (setting, text) in variables {
            loading.apply(setting, &text, setting.variable());
        }
        for (setting, text) in &flags.0 {
            loading.apply(setting, text, format!("--{}", setting.flag()));
        }
        let ConfigLoader { config, sources, mut mistakes, mut warnings } = loading;
        rules::check(&config, &sources, &mut mistakes);
        rules::warn(&config, &sources, &mut warnings);
        Self { config, mistakes, warnings }
    }

    /// The configuration, if it has no mistakes.
    ///
    /// The configuration, if it has no mistakes.
    ///
    /// # Errors
    /// Every mistake at once.
    pub fn checked(self) -> Result<Config, ConfigError> {
        if self.mistakes.is_empty() { Ok(self.config) } else { Err(ConfigError(self.mistakes)) }
    }
}

#[derive(Default)]
struct ConfigLoader {
    config: Config,
    sources: SettingSources,
    mistakes: Vec<ConfigMistake>,
    warnings: Vec<ConfigMistake>,
}

impl ConfigLoader {
    fn apply_file(&mut self, name: &str, text: &str) {
        for found in file::parse(name, text) {
            match found {
                Ok(entry) => self.apply(entry.setting, &entry.text, entry.location),
                Err(mistake) => self.mistakes.push(mistake),
            }
        }
    }

    fn apply(&mut self, setting: &'static Setting, text: &str, location: String) {
        match (setting.read)(&mut self.config, text) {
            Ok(()) => self.sources.note(setting, location),
            Err(problem) => self.mistakes.push(ConfigMistake { location, problem }),
        }
    }
}

fn config_file(flags: &Flags, variables: &[(&'static Setting, String)]) -> Option<(&'static str, PathBuf)> {
    let named = |given: &[(&'static Setting, String)]| {
        given.iter().find(|(setting, _)| setting.name == "config").map(|(_, text)| PathBuf::from(text))
    };
    let flag = named(&flags.0).map(|path| ("--config", path));
    let given = flag.or_else(|| named(variables).map(|path| ("FANFARE_CONFIG", path)));
    given.filter(|(_, path)| !path.as_os_str().is_empty())
}

/// The settings among the variables. An empty variable counts as not given.
fn variables(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    loading: &mut ConfigLoader,
) -> Vec<(&'static Setting, String)> {
    let mut given = Vec::new();
    let mut environment: Vec<_> = environment.into_iter().collect();
    environment.sort();
    for (name, value) in environment {
        let name = &*name.to_string_lossy();
        let is_other = !name.starts_with("FANFARE_") || CLIENT_VARIABLES.contains(&name);
        if is_other || is_service_link(name, &value) || value.is_empty() {
            continue;
        }
        let setting = settings().find(|setting| setting.variable() == name);
        match (setting, value.into_string()) {
            (Some(setting), Ok(text)) => given.push((setting, text)),
            (Some(_), Err(_)) => loading.mistakes.push(ConfigMistake::new(name, "is not UTF-8")),
            (None, _) => loading.warnings.push(ConfigMistake::new(name, unknown_variable(name))),
        }
    }
    given
}

fn unknown_variable(name: &str) -> String {
    let short = |name: &str| name.trim_start_matches("FANFARE_").to_owned();
    let known: Vec<_> = settings().map(|setting| short(&setting.variable())).collect();
    match nearest(&short(name), known.iter().map(String::as_str)) {
        Some(meant) => format!("is no setting and has no effect, did you mean FANFARE_{meant}?"),
        None => "is no setting and has no effect".to_owned(),
    }
}

/// Whether Kubernetes sets such a variable, for a service named `fanfare` or `fanfare-…`.
fn is_service_link(name: &str, value: &OsStr) -> bool {
    let is_address = value.to_str().is_some_and(|value| value.contains("://"));
    let is_port_of = |(_, rest): (&str, &str)| rest.starts_with(|c: char| c.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.ends_with("_PORT") && is_address)
        || name.split_once("_PORT_").is_some_and(is_port_of)
}
