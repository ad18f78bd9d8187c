//! `fanfare outbox`: the events that wait for the targets of a node, its dead letters, and their retry.
//!
//! The command opens the data folder itself, or asks the running node, which has the files locked, over its admin
//! listener.

use std::time::{Duration, Instant};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use fanfare_proto::outbox::{EventPage, EventState, Retried, Retry, TargetList, TargetState};
use fanfare_proto::path::encode;
use serde::Serialize;

use super::failure::{CommandOutcome, Failure};
use super::output;
use super::running::RunningNode;
use super::runtime;
use crate::app::StoppedOutbox;
use crate::config::{Config, flags, parse_duration};
use crate::telemetry;

/// Events of one page.
const PAGE: usize = 500;
/// Interval of a drain's lines.
const LINE_EVERY: Duration = Duration::from_secs(10);

pub(super) fn command() -> Command {
    let json = Arg::new("json").long("json").action(ArgAction::SetTrue).help("One JSON object per line");
    Command::new("outbox")
        .about("Events that integrations and queues have yet to receive, and dead letters")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("list")
                .about("Lists the targets with events, and the disabled ones")
                .arg(json)
                .args(flags::arguments()),
        )
        .subcommand(
            Command::new("show")
                .about("Prints the events of a target, one JSON object per line: dead letters, then what waits")
                .arg(target())
                .arg(
                    Arg::new("state")
                        .long("state")
                        .value_name("STATE")
                        .value_parser(["dead", "waiting"])
                        .help("Only these events [default: both]"),
                )
                .arg(
                    Arg::new("count")
                        .long("count")
                        .value_name("N")
                        .value_parser(value_parser!(usize))
                        .default_value("100")
                        .help("At most so many events"),
                )
                .args(flags::arguments()),
        )
        .subcommand(
            Command::new("retry")
                .about(
                    "Lets dead letters of a target wait for it again, behind what waits already, and enables a target \
                     that has answered 410",
                )
                .arg(target())
                .arg(
                    Arg::new("event")
                        .long("event")
                        .value_name("N")
                        .action(ArgAction::Append)
                        .value_parser(value_parser!(u64))
                        .help("Only the event with this number; may be given again [default: all dead letters]"),
                )
                .args(flags::arguments()),
        )
        .subcommand(
            Command::new("drain")
                .about("Sends what the outbox of a node has that will not run again")
                .arg(
                    Arg::new("patience")
                        .long("patience")
                        .value_name("DURATION")
                        .value_parser(parse_duration)
                        .default_value("60s")
                        .help("Gives up when nothing was delivered for so long"),
                )
                .args(flags::arguments()),
        )
}

fn target() -> Arg {
    Arg::new("target")
        .value_name("TARGET")
        .required(true)
        .value_parser(TargetArgument::parse)
        .help("As list prints it: account/integration, or account/queue:ID")
}

/// Runs the subcommand of these matches.
pub(super) fn run(matches: &ArgMatches, config: &Config) -> Result<CommandOutcome, Failure> {
    match matches.subcommand() {
        Some(("list", matches)) => runtime::interruptible(list(config, matches.get_flag("json"))),
        Some(("show", matches)) => runtime::interruptible(show(config, matches)),
        Some(("retry", matches)) => runtime::interruptible(retry(config, matches)),
        Some(("drain", matches)) => {
            let patience = matches.get_one::<Duration>("patience").copied().unwrap_or_default();
            let _logs = telemetry::start_logs(&config.log, config.log_format)
                .map_err(|error| Failure::because("cannot start the logs", &error))?;
            runtime::interruptible(drain(config, patience))
        }
        _ => Err(Failure::usage("outbox: list, show, retry and drain are known")),
    }
}

/// The account, and its integration or queue.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TargetArgument {
    account: String,
    target: String,
}

impl TargetArgument {
    fn parse(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((account, target)) if !account.is_empty() && !target.is_empty() => {
                Ok(Self { account: account.to_owned(), target: target.to_owned() })
            }
            _ => Err("expected account/integration, or account/queue:ID".to_owned()),
        }
    }

    fn of(matches: &ArgMatches) -> Result<Self, Failure> {
        matches.get_one::<Self>("target").cloned().ok_or_else(|| Failure::usage("TARGET is missing"))
    }

    fn path(&self) -> String {
        format!("/outbox/{}/{}", encode(&self.account), encode(&self.target))
    }

    fn parts(&self) -> (&str, &str) {
        (&self.account, &self.target)
    }
}

/// The way to the outbox.
enum OutboxAccess {
    Running(RunningNode),
    Stopped(StoppedOutbox),
}

impl OutboxAccess {
    /// Opens the folder, whose lock shows whether a node runs on it: `node.json` may be of another machine.
    async fn open(config: &Config) -> Result<Self, Failure> {
        let closed = match StoppedOutbox::open(config).await {
            Ok(outbox) => return Ok(Self::Stopped(outbox)),
            Err(error) => Failure::because("outbox", &error),
        };
        RunningNode::find(config).await?.map(Self::Running).ok_or(closed)
    }

    async fn targets(&self) -> Result<Vec<TargetState>, Failure> {
        match self {
            Self::Running(node) => {
                let list: TargetList = node.ask("GET", "/outbox", String::new()).await?;
                Ok(list.targets)
            }
            Self::Stopped(outbox) => Ok(outbox.targets().await),
        }
    }

    async fn events(
        &self,
        target: &TargetArgument,
        state: EventState,
        after: Option<&str>,
        limit: usize,
    ) -> Result<EventPage, Failure> {
        match self {
            Self::Running(node) => {
                let after = after.map(|after| format!("&after={after}")).unwrap_or_default();
                let path = format!("{}?state={}&limit={limit}{after}", target.path(), state.as_str());
                node.ask("GET", &path, String::new()).await
            }
            Self::Stopped(outbox) => {
                let page = outbox.events(target.parts(), state, after, limit).await;
                page.map_err(|error| Failure::because("outbox", &error))
            }
        }
    }

    async fn retry(&self, target: &TargetArgument, events: Option<Vec<u64>>) -> Result<Retried, Failure> {
        match self {
            Self::Running(node) => {
                let body = line(&Retry { events })?;
                node.ask("POST", &format!("{}/retry", target.path()), body).await
            }
            Self::Stopped(outbox) => {
                let retried = outbox.retry(target.parts(), events).await;
                retried.map_err(|error| Failure::because("outbox", &error))
            }
        }
    }

    fn is_running(&self) -> bool {
        matches!(self, Self::Running(_))
    }

    async fn close(self) {
        if let Self::Stopped(outbox) = self {
            outbox.close().await;
        }
    }
}

async fn list(config: &Config, json: bool) -> Result<CommandOutcome, Failure> {
    let access = OutboxAccess::open(config).await?;
    let (targets, is_running) = (access.targets().await?, access.is_running());
    access.close().await;
    if json {
        let lines: Result<Vec<String>, Failure> = targets.iter().map(line).collect();
        return output::print(&lines?.concat());
    }
    output::print(&table(&targets, is_running))
}

fn line(value: &impl Serialize) -> Result<String, Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::because("outbox", &error))?;
    Ok(format!("{text}\n"))
}

/// The targets as a table. `is_running`: a running node sends the waiting events.
fn table(targets: &[TargetState], is_running: bool) -> String {
    if targets.is_empty() {
        return "nothing waits, and there are no dead letters\n".to_owned();
    }
    let width = targets.iter().map(|target| target.target.chars().count()).max().unwrap_or_default().max(6);
    let mut text = format!(
        "{:width$}  {:7}  {:>9}  {:>12}  {:>9}  {:8}  {}\n",
        "TARGET", "KIND", "WAITING", "BYTES", "DEAD", "STATE", "LAST FAILURE"
    );
    for target in targets {
        let state = match (&target.kind, target.disabled) {
            (_, true) => "disabled",
            (_, false) if !is_running => "stopped",
            (None, _) => "unknown",
            (Some(_), false) => "sending",
        };
        let kind = target.kind.as_deref().unwrap_or("-");
        let name = output::printable(&target.target);
        let (waiting, bytes, dead) = (target.waiting_events, target.waiting_bytes, target.dead_events);
        let failure = target.last_failure.as_deref().map(output::printable).unwrap_or_default();
        let line =
            format!("{name:width$}  {kind:7}  {waiting:>9}  {bytes:>12}  {dead:>9}  {state:8}  {failure}");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

async fn show(config: &Config, matches: &ArgMatches) -> Result<CommandOutcome, Failure> {
    let target = TargetArgument::of(matches)?;
    let mut left = matches.get_one::<usize>("count").copied().unwrap_or_default();
    let given = matches.get_one::<String>("state");
    let states = [EventState::Dead, EventState::Waiting];
    let access = OutboxAccess::open(config).await?;
    let mut shown = 0;
    for state in states.into_iter().filter(|state| given.is_none_or(|given| given == state.as_str())) {
        let mut after = None;
        while left > 0 {
            let page = access.events(&target, state, after.as_deref(), left.min(PAGE)).await?;
            left = left.saturating_sub(page.events.len());
            shown += page.events.len();
            let lines: Result<Vec<String>, Failure> = page.events.iter().map(line).collect();
            if !output::write(&lines?.concat())? || page.next.is_none() {
                break;
            }
            after = page.next;
        }
    }
    access.close().await;
    if shown == 0 {
        output::report("the target has no such events; fanfare outbox list names those that have some");
    }
    Ok(CommandOutcome::Done)
}

async fn retry(config: &Config, matches: &ArgMatches) -> Result<CommandOutcome, Failure> {
    let target = TargetArgument::of(matches)?;
    let events = matches.get_many::<u64>("event").map(|events| events.copied().collect());
    let access = OutboxAccess::open(config).await?;
    let retried = access.retry(&target, events).await;
    let is_running = access.is_running();
    access.close().await;
    let Retried { events, left } = retried?;
    if events == 0 && left == 0 {
        return Err(Failure::failed(
            "outbox retry: the target has no dead letters; fanfare outbox list names those that have",
        ));
    }
    let left = if left > 0 { format!("; {left} dead letters are left") } else { String::new() };
    let when = if is_running { "" } else { " after the next start" };
    output::print(&format!("{events} events are sent again{when}{left}\n"))
}

async fn drain(config: &Config, patience: Duration) -> Result<CommandOutcome, Failure> {
    let outbox =
        StoppedOutbox::begin(config).await.map_err(|error| Failure::because("outbox drain", &error))?;
    let mut last: Option<Instant> = None;
    let on_progress = |left| {
        if last.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
            output::report(&format!("{left} events wait for known targets"));
            last = Some(Instant::now());
        }
    };
    outbox.drain(patience, on_progress).await;
    let targets = outbox.targets().await;
    outbox.close().await;
    let left: u64 = targets.iter().map(|target| target.waiting_events).sum();
    let dead: u64 = targets.iter().map(|target| target.dead_events).sum();
    output::write(&table(&targets, true))?;
    if left > 0 {
        let has_queue =
            targets.iter().any(|target| target.waiting_events > 0 && target.target.contains("/queue:"));
        let hint = if has_queue && config.amqp_url.is_none() {
            "; those of queues need --amqp-url and --amqp-management-url"
        } else {
            ""
        };
        return Err(Failure::failed(format!("outbox drain: {left} events are left{hint}")));
    }
    if dead > 0 {
        output::report(&format!("{dead} dead letters are left: fanfare outbox show prints them"));
    }
    Ok(CommandOutcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_account_and_integration() {
        let target = TargetArgument::parse("acme/queue:7 b").expect("a target");
        assert_eq!(target.path(), "/outbox/acme/queue%3A7%20b");
        for text in ["acme", "/a", "acme/", ""] {
            assert!(TargetArgument::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn table_names_state_and_counts() {
        let target = |name: &str, kind: Option<&str>, disabled| TargetState {
            target: name.to_owned(),
            kind: kind.map(str::to_owned),
            waiting_events: 3,
            waiting_bytes: 1_000,
            oldest_ms: Some(1),
            dead_events: 2,
            dead_bytes: 9,
            disabled,
            last_failure: disabled.then(|| "status 410".to_owned()),
        };
        let text = table(
            &[
                target("acme/orders", Some("webhook"), false),
                target("acme/old", None, false),
                target("acme/gone", Some("sns"), true),
            ],
            true,
        );
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(lines[1], ["acme/orders", "webhook", "3", "1000", "2", "sending"]);
        assert_eq!(lines[2], ["acme/old", "-", "3", "1000", "2", "unknown"]);
        assert_eq!(lines[3], ["acme/gone", "sns", "3", "1000", "2", "disabled", "status", "410"]);
        assert!(table(&[], true).contains("nothing waits"));
    }
}
