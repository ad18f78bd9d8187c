//! `fanfare token inspect`: the content of a token, and why a node would refuse it.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use super::failure::{CommandOutcome, Failure};
use super::output;
use super::target;
use crate::accounts::{Accounts, Directory};
use crate::auth::{Inspection, inspect};
use crate::model::{Clock, Limits};

/// Bound of the input: above any token that a node accepts.
const STDIN_BYTES_MAX: u64 = 1024 * 1024;

#[derive(Args)]
pub(super) struct InspectArguments {
    /// The service JWT, or - to read it from standard input
    #[arg(value_name = "TOKEN", allow_hyphen_values = true)]
    token: String,

    /// The directory file with the key that has signed it; else directory.toml in the data folder, where it exists
    #[arg(long, value_name = "FILE")]
    directory: Option<PathBuf>,

    /// The key that has signed it, <secret>.<keyName>; its capability is not known then
    #[arg(long, value_name = "KEY", allow_hyphen_values = true, conflicts_with = "directory")]
    key: Option<String>,

    /// The data folder of a node on this machine; else FANFARE_DATA_DIR [default: ./data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,

    /// The name of the service, as the node has it
    #[arg(long, value_name = "NAME")]
    audience: Option<String>,
}

pub(super) fn run(arguments: InspectArguments) -> Result<CommandOutcome, Failure> {
    let accounts = arguments.accounts()?;
    let directory = accounts.as_ref().map(|accounts| accounts.current());
    let token = read(&arguments.token)?;
    let now_ms = Clock::system().now_ms();
    let inspection = inspect(
        token.trim(),
        directory.as_deref(),
        &Limits::default(),
        arguments.audience.as_deref(),
        now_ms,
    );
    output::print(&report(&inspection, directory.as_deref(), now_ms))?;
    match inspection.refused {
        None => Ok(CommandOutcome::Done),
        Some(reason) => {
            let detail = inspection.detail.map_or(String::new(), |detail| format!(": {detail}"));
            Err(Failure::failed(format!("a node refuses it: {} ({reason}){detail}", reason.name())))
        }
    }
}

impl InspectArguments {
    /// The accounts to check with; `None` if the signature cannot be verified.
    fn accounts(&self) -> Result<Option<Arc<Accounts>>, Failure> {
        let usage = |error: &dyn std::fmt::Display| Failure::usage(error.to_string());
        if let Some(key) = &self.key {
            return Accounts::from_text(&directory_of(key)?).map(Some).map_err(|error| usage(&error));
        }
        let own = target::data_dir(self.data_dir.clone()).join("directory.toml");
        let file = self.directory.clone().or_else(|| own.exists().then_some(own));
        let retention_hours = Limits::default().history_retention_hours;
        file.map(|file| Accounts::open(&file, retention_hours)).transpose().map_err(|error| usage(&error))
    }
}

/// A directory with this key alone, which may do everything.
fn directory_of(key: &str) -> Result<String, Failure> {
    let key: fanfare_client::Key = key.parse().map_err(|error| Failure::usage(format!("--key: {error}")))?;
    let text = |text: &str| toml::Value::from(text).to_string();
    Ok(format!(
        "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n[[tenants.accounts.keys]]\nname = {}\nsecret = {}\n\
         status = \"active\"\n\
         capability = {{ \"*\" = [\"subscribe\", \"publish\", \"presence\", \"history\", \"amqp-subscribe\"] }}\n",
        text(key.name()),
        text(key.secret())
    ))
}

fn read(argument: &str) -> Result<String, Failure> {
    if argument != "-" {
        return Ok(argument.to_owned());
    }
    let mut token = String::new();
    let read = std::io::stdin().take(STDIN_BYTES_MAX).read_to_string(&mut token);
    read.map_err(|error| Failure::failed(format!("cannot read standard input: {error}")))?;
    Ok(token)
}

fn report(inspection: &Inspection, directory: Option<&Directory>, now_ms: u64) -> String {
    let mut text = String::new();
    let mut line =
        |name: &str, value: &str| writeln!(text, "{name:<21} {value}").expect("a string takes all");
    if let Some(key_name) = &inspection.key_name {
        line("key", &key_name.escape_debug().to_string());
    }
    for (name, value) in &inspection.claims {
        let name = &*name.escape_debug().to_string();
        match value.as_f64().filter(|_| ["iat", "exp", "nbf"].contains(&name)) {
            Some(seconds) => line(name, &format!("{value} ({})", distance(seconds, now_ms))),
            None => line(name, &value.to_string()),
        }
    }
    if inspection.key_name.is_some() && directory.is_none() {
        line("signature", "not verified: name the key's --directory, or --key");
    }
    if inspection.refused.is_none() {
        let result = if directory.is_some() { "good" } else { "nothing is wrong with what can be seen" };
        line("result", &format!("{result}; no node was asked whether it is revoked"));
    }
    text
}

/// The difference of a time from this machine's clock, in words.
fn distance(seconds: f64, now_ms: u64) -> String {
    let from_now = seconds.floor() - (now_ms / 1000) as f64;
    match from_now {
        0.0 => "now".to_owned(),
        1.0.. => format!("in {from_now} s"),
        _ => format!("{} s ago", -from_now),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, FromArgMatches as _};
    use fanfare_client::sign::{self, JwtParams};

    use super::*;

    const KEY: &str = "a \"secret\" with . and \\.k1";
    const NOW_S: u64 = 1_767_225_600;

    fn signed(key: &str, issued_s: u64) -> String {
        let params = JwtParams {
            capability: r#"{"demo":["subscribe"]}"#.to_owned(),
            client_id: Some("ann".to_owned()),
            issued_s: Some(issued_s),
            ttl_s: 60,
        };
        sign::jwt(&key.parse().expect("a key"), &params).expect("signed")
    }

    fn inspected(token: &str, given: &[&str]) -> (String, Option<&'static str>) {
        let command = InspectArguments::augment_args(Command::new("inspect").no_binary_name(true));
        let matches = command.get_matches_from([given, &["--data-dir", "/nowhere", "--", token]].concat());
        let arguments = InspectArguments::from_arg_matches(&matches).expect("good arguments");
        let accounts = arguments.accounts().expect("a directory");
        let directory = accounts.as_ref().map(|accounts| accounts.current());
        let inspection = inspect(token, directory.as_deref(), &Limits::default(), None, NOW_S * 1000);
        (report(&inspection, directory.as_deref(), NOW_S * 1000), inspection.refused.map(|no| no.name()))
    }

    #[test]
    fn a_good_token_shows_what_it_says() {
        let (report, refused) = inspected(&signed(KEY, NOW_S - 10), &["--key", KEY]);
        assert_eq!(refused, None, "{report}");
        for (name, value) in
            [("key", "k1"), ("iat", "1767225590 (10 s ago)"), ("exp", "1767225650 (in 50 s)")]
        {
            assert!(report.contains(&format!("{name:<21} {value}\n")), "{report}");
        }
        assert!(
            report.contains("\"ann\"")
                && report.ends_with(" good; no node was asked whether it is revoked\n"),
            "{report}"
        );
        assert!(!report.contains("secret"), "{report}");
    }

    #[test]
    fn token_fault_is_named_with_and_without_a_key() {
        let good = signed(KEY, NOW_S);
        for (token, given, reason) in [
            (signed(KEY, NOW_S - 61), &["--key", KEY][..], Some("expired")),
            (signed(KEY, NOW_S - 61), &[], Some("expired")),
            (signed(KEY, NOW_S + 121), &[], Some("issued_in_future")),
            (good.clone(), &["--key", "other.k1"], Some("bad_signature")),
            (good.clone(), &["--key", "other.k2"], Some("unknown_key")),
            (good.clone(), &[], None),
            ("x".to_owned(), &[], Some("malformed")),
            (KEY.to_owned(), &[], Some("malformed")),
        ] {
            let (report, refused) = inspected(&token, given);
            assert_eq!(refused, reason, "{given:?}: {report}");
            assert_eq!(report.contains("not verified"), given.is_empty() && reason != Some("malformed"));
        }
    }
}
