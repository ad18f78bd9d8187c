//! A node that goes on as another run: the program once more in the place of itself, at the same addresses.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use super::failure::Failure;
use crate::app::Addresses;
use crate::config::Config;

/// How often it has, which the program tells itself; no setting.
const TIMES: &str = "_FANFARE_BEGUN_ANEW";

/// Returns no more than a failure. Like a kill it ends all that the node does, and the sockets that it has.
pub(super) fn begin(config: &Config, addresses: Addresses) -> Failure {
    tracing::warn!("others held this node for dead while it stood still, so it begins anew as another run");
    let mut given = std::env::args_os();
    let name = given.next().unwrap_or_else(|| "fanfare".into());
    let error = program().map(|program| {
        let mut command = Command::new(program);
        command.arg0(name).args(arguments(given, &chosen(config, addresses)));
        command.env(TIMES, (times() + 1).to_string()).exec()
    });
    Failure::because("cannot begin anew", &error.unwrap_or_else(|error| error))
}

/// Where its file is gone, or another one is in its place, what runs goes on.
fn program() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    Ok(if program.is_file() { program } else { PathBuf::from("/proc/self/exe") })
}

/// To be called once the node has started.
pub(super) fn count() {
    const NAME: &str = "fanfare_runs_begun_anew_total";
    metrics::describe_counter!(
        NAME,
        "Times that this process began another run, since others held it for dead"
    );
    metrics::counter!(NAME).absolute(times());
}

fn times() -> u64 {
    std::env::var(TIMES).ok().and_then(|times| times.parse().ok()).unwrap_or(0)
}

/// The addresses whose port the system has chosen, by their flags: others know the node by them.
fn chosen(config: &Config, addresses: Addresses) -> Vec<(&'static str, SocketAddr)> {
    let all = [
        ("--listen", Some(config.listen), Some(addresses.listen)),
        ("--admin-listen", Some(config.admin_listen), Some(addresses.admin)),
        ("--gossip-listen", config.gossip_listen, addresses.gossip),
        ("--peer-listen", config.peer_listen, addresses.peer),
    ];
    let chosen = all.into_iter().filter(|(_, asked, _)| asked.is_some_and(|asked| asked.port() == 0));
    chosen.filter_map(|(flag, _, bound)| Some((flag, bound?))).collect()
}

/// What was given, with these in the place of what was given for them.
fn arguments(mut given: impl Iterator<Item = OsString>, chosen: &[(&str, SocketAddr)]) -> Vec<OsString> {
    let mut arguments = Vec::new();
    while let Some(argument) = given.next() {
        let text = argument.to_str().unwrap_or_default();
        let (flag, value) = text.split_once('=').map_or((text, None), |(flag, value)| (flag, Some(value)));
        if chosen.iter().all(|(chosen, _)| *chosen != flag) {
            arguments.push(argument);
        } else if value.is_none() {
            given.next();
        }
    }
    let chosen = chosen.iter().map(|(flag, address)| format!("{flag}={address}"));
    arguments.extend(chosen.map(OsString::from));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn a_port_that_the_system_has_chosen_is_kept() {
        let config = Config {
            listen: at(0),
            admin_listen: at(8081),
            gossip_listen: Some(at(0)),
            peer_listen: None,
            ..Config::default()
        };
        let addresses = Addresses { listen: at(1), admin: at(8081), gossip: Some(at(2)), peer: None };
        let chosen = chosen(&config, addresses);
        assert_eq!(chosen, [("--listen", at(1)), ("--gossip-listen", at(2))]);
        for (given, kept) in [
            ("", ""),
            ("serve", "serve "),
            ("--listen 127.0.0.1:0 --insecure", "--insecure "),
            (
                "serve --node-id --x --listen=127.0.0.1:0 --admin-listen a",
                "serve --node-id --x --admin-listen a ",
            ),
        ] {
            let given = given.split_whitespace().map(OsString::from);
            let expected = format!("{kept}--listen=127.0.0.1:1 --gossip-listen=127.0.0.1:2");
            assert_eq!(
                arguments(given, &chosen),
                expected.split(' ').map(OsString::from).collect::<Vec<_>>()
            );
        }
    }
}
