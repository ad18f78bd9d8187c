//! Restart in place: the program replaces itself and continues as a new incarnation at the same addresses.

use std::ffi::{CString, OsString};
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::ptr;

use super::failure::Failure;
use crate::app::Addresses;
use crate::config::Config;

/// Environment variable that carries the number of restarts to the new program; not a setting.
const TIMES: &str = "_FANFARE_BEGUN_ANEW";
/// Environment variable that carries the gossip addresses of the former members to the new program; not a setting.
const MEMBERS: &str = "_FANFARE_MEMBERS";

/// Replaces the process; returns only a failure. Ends all work and all sockets, as a kill does. Logs nothing, as the reader of the log may
/// be stalled.
pub(super) fn begin(config: &Config, addresses: Addresses, members: &[SocketAddr]) -> Failure {
    let members: Vec<_> = members.iter().map(SocketAddr::to_string).collect();
    // A node that has met no peer yet may still have addresses from its predecessor.
    let members =
        Some(members.join(",")).filter(|members| !members.is_empty()).unwrap_or_else(members_before);
    let variables = [(TIMES, (times() + 1).to_string()), (MEMBERS, members)];
    let mut given = std::env::args_os();
    let name = given.next().unwrap_or_else(|| "fanfare".into());
    let arguments = [name].into_iter().chain(arguments(given, &chosen(config, addresses)));
    let error =
        program().and_then(|program| replace(program, arguments, variables)).unwrap_or_else(|error| error);
    Failure::because("cannot restart in place", &error)
}

/// Replaces the program of the process, or returns the error. Unlike `CommandExt::exec` it leaves signals alone: with a restored SIGPIPE,
/// the writes of other threads to closed sockets would end the process first.
#[expect(unsafe_code, reason = "there is no safe call that leaves signals as they are")]
fn replace(
    program: PathBuf,
    arguments: impl Iterator<Item = OsString>,
    variables: [(&str, String); 2],
) -> io::Result<io::Error> {
    let own = std::env::vars_os().filter(|(name, _)| variables.iter().all(|(variable, _)| name != variable));
    let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
    let environment = own.chain(variables).map(|(mut name, value)| {
        name.extend(["=".as_ref(), &*value]);
        name
    });
    let text = |text: OsString| CString::new(text.into_vec());
    let program = text(program.into_os_string())?;
    let [arguments, environment] = [
        arguments.map(text).collect::<Result<Vec<_>, _>>()?,
        environment.map(text).collect::<Result<_, _>>()?,
    ];
    let pointers =
        |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect::<Vec<_>>();
    let lists = [pointers(&arguments), pointers(&environment)];
    // SAFETY: these are texts that live here, and both lists end with a null pointer.
    unsafe { libc::execve(program.as_ptr(), lists[0].as_ptr(), lists[1].as_ptr()) };
    Ok(io::Error::last_os_error())
}

/// The path of the running program, also if its file was removed or replaced.
fn program() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    Ok(if program.is_file() { program } else { PathBuf::from("/proc/self/exe") })
}

/// Sets the restart counter; to be called once the node has started.
pub(super) fn count() {
    metrics::counter!("fanfare_runs_begun_anew_total").absolute(times());
    if times() > 0 {
        tracing::warn!("restarted in place after a process stall");
    }
}

/// Adds the members of the previous incarnation to the seeds, so that the node does not serve before it has met them.
pub(super) fn with_members(mut config: Config) -> Config {
    let members = members_before();
    config.seeds.extend(members.split(',').filter(|member| !member.is_empty()).map(str::to_owned));
    config
}

fn members_before() -> String {
    std::env::var(MEMBERS).unwrap_or_default()
}

fn times() -> u64 {
    std::env::var(TIMES).ok().and_then(|times| times.parse().ok()).unwrap_or(0)
}

/// The addresses whose port the system chose, by their flags: peers know the node by them.
fn chosen(config: &Config, addresses: Addresses) -> Vec<(&'static str, SocketAddr)> {
    let all = [
        ("--listen", Some(config.listen), Some(addresses.listen)),
        ("--admin-listen", Some(config.admin_listen), Some(addresses.admin)),
        ("--gossip-listen", config.gossip_listen, addresses.gossip),
        ("--peer-listen", config.peer_listen, addresses.peer),
    ];
    let chosen =
        all.into_iter().filter(|(_, requested, _)| requested.is_some_and(|requested| requested.port() == 0));
    chosen.filter_map(|(flag, _, bound)| Some((flag, bound?))).collect()
}

/// The arguments as given, with these addresses instead of the given ones.
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
    use std::io::Write as _;
    use std::process::Command;
    use std::thread;

    use super::*;

    /// Starts a process that restarts in place again and again, while a thread writes to a closed pipe.
    #[test]
    fn restart_in_place_survives_writes_of_other_threads() -> Result<(), Failure> {
        const NAME: &str = "cli::restart_in_place::tests::restart_in_place_survives_writes_of_other_threads";
        match times() {
            0 => {
                let mut child = Command::new(std::env::current_exe().expect("its file"));
                let ended = child.args(["--exact", NAME]).env(TIMES, "1").output().expect("a process");
                let output = String::from_utf8_lossy(&ended.stdout);
                assert!(ended.status.success() && output.contains("1 passed"), "{}: {output}", ended.status);
            }
            1..20 => {
                let (reader, mut writer) = io::pipe().expect("a pipe");
                drop(reader);
                thread::spawn(move || while writer.write(b"?").is_err() {});
                let addresses = Addresses { listen: at(1), admin: at(1), gossip: None, peer: None };
                return Err(begin(&Config::default(), addresses, &[]));
            }
            _ => {}
        }
        Ok(())
    }

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
