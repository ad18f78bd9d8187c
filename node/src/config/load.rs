//! Defaults, then the file, then the environment, then the flags.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::Config;
use super::error::{ConfigError, Mistake};
use super::file;
use super::flags::Flags;
use super::nearest::nearest;
use super::rules::{self, Places};
use super::settings::{Setting, settings};

/// Variables of the client commands.
const CLIENT_VARIABLES: [&str; 3] = ["FANFARE_KEY", "FANFARE_TOKEN", "FANFARE_URL"];

impl Config {
    /// Reads the file that the flags or the environment name, and merges all three.
    ///
    /// # Errors
    /// Every mistake in any of them at once, also where a stronger source overrides it.
    pub fn load(
        flags: &Flags,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, ConfigError> {
        let (config, mistakes) = Self::load_as_far_as_possible(flags, environment);
        if mistakes.is_empty() { Ok(config) } else { Err(ConfigError(mistakes)) }
    }

    /// The same, with what could be read beside the mistakes.
    pub fn load_as_far_as_possible(
        flags: &Flags,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> (Self, Vec<Mistake>) {
        let mut loading = Loading::default();
        let variables = variables(environment, &mut loading.mistakes);
        if let Some((place, path)) = config_file(flags, &variables) {
            let name = path.display().to_string();
            match std::fs::read_to_string(&path) {
                Ok(text) => loading.apply_file(&name, &text),
                Err(error) => {
                    loading.mistakes.push(Mistake::new(place, format!("cannot read {name}: {error}")));
                }
            }
        }
        for (setting, text) in variables {
            loading.apply(setting, &text, setting.variable());
        }
        for (setting, text) in &flags.0 {
            loading.apply(setting, text, format!("--{}", setting.flag()));
        }
        let Loading { config, places, mut mistakes } = loading;
        rules::check(&config, &places, &mut mistakes);
        (config, mistakes)
    }
}

#[derive(Default)]
struct Loading {
    config: Config,
    places: Places,
    mistakes: Vec<Mistake>,
}

impl Loading {
    fn apply_file(&mut self, name: &str, text: &str) {
        for found in file::parse(name, text) {
            match found {
                Ok(entry) => self.apply(entry.setting, &entry.text, entry.place),
                Err(mistake) => self.mistakes.push(mistake),
            }
        }
    }

    fn apply(&mut self, setting: &'static Setting, text: &str, place: String) {
        match (setting.read)(&mut self.config, text) {
            Ok(()) => self.places.note(setting, place),
            Err(problem) => self.mistakes.push(Mistake { place, problem }),
        }
    }
}

fn config_file(flags: &Flags, variables: &[(&'static Setting, String)]) -> Option<(&'static str, PathBuf)> {
    let named = |given: &[(&'static Setting, String)]| {
        given.iter().find(|(setting, _)| setting.name == "config").map(|(_, text)| PathBuf::from(text))
    };
    let flag = named(&flags.0).map(|path| ("--config", path));
    flag.or_else(|| named(variables).map(|path| ("FANFARE_CONFIG", path)))
}

/// The settings among the variables. An empty variable counts as not given.
fn variables(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
    mistakes: &mut Vec<Mistake>,
) -> Vec<(&'static Setting, String)> {
    let mut given = Vec::new();
    let mut environment: Vec<_> = environment.into_iter().collect();
    environment.sort();
    for (name, value) in environment {
        let Some(name) = name.to_str().filter(|name| name.starts_with("FANFARE_")) else { continue };
        if CLIENT_VARIABLES.contains(&name) || is_service_link(name, &value) || value.is_empty() {
            continue;
        }
        let setting = settings().find(|setting| setting.variable() == name);
        match (setting, value.into_string()) {
            (Some(setting), Ok(text)) => given.push((setting, text)),
            (Some(_), Err(_)) => mistakes.push(Mistake::new(name, "is not UTF-8")),
            (None, _) => mistakes.push(Mistake::new(name, unknown_variable(name))),
        }
    }
    given
}

fn unknown_variable(name: &str) -> String {
    let short = |name: &str| name.trim_start_matches("FANFARE_").to_owned();
    let known: Vec<_> = settings().map(|setting| short(&setting.variable())).collect();
    match nearest(&short(name), known.iter().map(String::as_str)) {
        Some(meant) => format!("is not known, did you mean FANFARE_{meant}?"),
        None => "is not known".to_owned(),
    }
}

/// Kubernetes sets such variables for a service that is named `fanfare` or `fanfare-…`.
fn is_service_link(name: &str, value: &OsStr) -> bool {
    let is_address = value.to_str().is_some_and(|value| value.contains("://"));
    let is_port_of = |(_, rest): (&str, &str)| rest.starts_with(|c: char| c.is_ascii_digit());
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.ends_with("_PORT") && is_address)
        || name.split_once("_PORT_").is_some_and(is_port_of)
}
