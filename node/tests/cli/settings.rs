//! A node's start and `check-config` report the same about a wrong setting.

use std::fs::{self, File, Permissions};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{fanfare, run};

const ENDS: [&str; 2] = ["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];

/// Output of both commands, neither of which may leave a file.
fn refused(folder: &Path, arguments: &[&str]) -> String {
    let files = || folder.read_dir().expect("a folder").count();
    let before = files();
    let printed = ["serve", "check-config"].map(|command| {
        let (code, stdout, stderr) = run(folder, &[&[command], &ENDS[..], arguments].concat());
        assert_eq!((code, stdout.as_str()), (2, ""), "{command} {arguments:?} {stderr}");
        stderr
    });
    assert_eq!(files(), before, "{arguments:?}");
    let [by_start, by_check] = printed;
    assert_eq!(by_start, by_check);
    by_start
}

#[test]
fn a_data_folder_that_is_none_is_named_with_its_setting() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    symlink("nothing", folder.path().join("link")).unwrap();
    for (data_dir, reason) in [
        ("file", "file cannot be a folder: file is a file\n"),
        ("file/data", "file/data cannot be a folder: file is a file\n"),
        ("link", "link cannot be a folder: link is a link to nothing\n"),
        ("/proc/data", "cannot make /proc/data in /proc: "),
    ] {
        let printed = refused(folder.path(), &["--data-dir", data_dir]);
        let line = format!("fanfare: --data-dir: {reason}");
        assert!(printed.starts_with(&line) && printed.lines().count() == 1, "{data_dir}: {printed}");
    }
}

#[test]
fn a_data_folder_without_rights_is_named_with_its_setting() {
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, Permissions::from_mode(0o555)).unwrap();
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    for (data_dir, reason) in [
        ("closed", "cannot write to closed: Permission denied"),
        ("closed/data", "cannot make closed/data in closed: Permission denied"),
    ] {
        for command in ["serve", "check-config"] {
            let program = env!("CARGO_BIN_EXE_fanfare");
            // Root may write everywhere, unless that capability is dropped.
            let mut process = if is_root {
                let mut process = Command::new("setpriv");
                process.args(["--bounding-set=-all", "--inh-caps=-all", program]);
                process
            } else {
                Command::new(program)
            };
            process.env_remove("FANFARE_CONFIG").current_dir(folder.path());
            let output = process.arg(command).args(ENDS).args(["--data-dir", data_dir]).output().unwrap();
            let printed = String::from_utf8(output.stderr).unwrap();
            assert!(printed.starts_with(&format!("fanfare: --data-dir: {reason}")), "{command} {printed}");
            assert_eq!(output.status.code(), Some(2), "{command} {printed}");
        }
    }
}

/// Faults that only a start can find.
#[test]
fn a_file_of_the_data_folder_that_is_none_is_named() {
    for name in ["admin-token", "connection-key", "store", "dev-key"] {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("data").join(name);
        if name == "store" {
            fs::create_dir(folder.path().join("data")).unwrap();
            fs::write(&at, "").unwrap();
        } else {
            fs::create_dir_all(&at).unwrap();
        }
        let (code, _, stderr) = run(folder.path(), &[&["serve"], &ENDS[..]].concat());
        // `check-config` reads the token, too.
        assert_eq!(code, if name == "admin-token" { 2 } else { 1 }, "{name} {stderr}");
        let named = if name == "dev-key" { "./data" } else { &format!("./data/{name}") };
        assert!(stderr.contains(named) && stderr.contains("--data-dir"), "{name} {stderr}");
    }
}

/// A system that writes no byte to a file, as a full disk.
#[test]
fn a_first_start_on_a_full_disk_is_in_no_later_ones_way() {
    let folder = tempfile::tempdir().unwrap();
    let mut full = Command::new("sh");
    full.args([
        "-c",
        "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"",
        env!("CARGO_BIN_EXE_fanfare"),
        "serve",
    ]);
    let output = full.args(ENDS).env_clear().current_dir(folder.path()).output().unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("cannot make ./data/admin-token: File too large"), "{printed}");
    assert_eq!(folder.path().join("data").read_dir().unwrap().count(), 0);
    let printed = until_node_is_up(folder.path());
    assert!(printed.contains("node is up"), "{printed}");
}

#[test]
fn empty_admin_token_is_recreated_and_a_bad_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("data/admin-token");
    fs::create_dir(folder.path().join("data")).unwrap();
    for (text, reason) in [("two words", "is not one line"), ("\"quoted\"", "stands in quotes")] {
        fs::write(&file, text).unwrap();
        let printed = refused(folder.path(), &[]);
        let place = "fanfare: --data-dir: what ./data/admin-token holds is no admin token: it ";
        assert!(printed.starts_with(&format!("{place}{reason}")), "{printed}");
    }
    fs::write(&file, "\n").unwrap();
    let (code, _, stderr) = run(folder.path(), &["check-config"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let printed = until_node_is_up(folder.path());
    assert!(printed.contains("node is up"), "{printed}");
    assert_eq!(fs::read_to_string(&file).unwrap().trim().len(), 43);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn more_connections_than_files_allow_are_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let limited = |command: &str| {
        let mut limited = Command::new("sh");
        let program = env!("CARGO_BIN_EXE_fanfare");
        limited.args(["-c", "ulimit -n 300; exec \"$0\" \"$@\"", program, command]).args(ENDS);
        limited.env_clear().env("FANFARE_LIMITS_CONNECTIONS", "1000").current_dir(folder.path());
        limited
    };
    let checked = limited("check-config").output().unwrap();
    let printed = "limits.connections: 1000 is lowered to 96, since the process may open 300 files, and event streams need their share\n";
    assert_eq!(String::from_utf8(checked.stderr).unwrap(), format!("fanfare: warning: {printed}"));
    assert_eq!(checked.status.code(), Some(0));
    let printed = until_up(folder.path(), limited("serve"));
    assert!(
        printed.contains("configuration warning") && printed.contains("1000 is lowered to 96"),
        "{printed}"
    );
}

#[test]
fn a_filter_that_leaves_the_node_out_still_warns() {
    let folder = tempfile::tempdir().unwrap();
    let mut node = fanfare(folder.path(), &[&["serve", "--log=fanfre=debug"], &ENDS[..]].concat());
    node.env("FANFARE_VERSION", "1.0");
    let printed = until_written(folder.path(), node, |printed| printed.contains("FANFARE_VERSION"));
    assert!(printed.contains("leaves out most lines of the node"), "{printed}");
    assert!(printed.contains("nothing logs as `fanfre`, did you mean fanfare?"), "{printed}");
}

#[test]
fn lines_without_a_reader_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (log, lines) = std::io::pipe().unwrap();
    let mut node = fanfare(folder.path(), &[&["serve", "--log=debug"], &ENDS[..]].concat());
    let mut node = node.stdout(Stdio::null()).stderr(lines).spawn().unwrap();
    let mut log = BufReader::new(log).lines();
    let up = log.find(|line| line.as_ref().is_ok_and(|line| line.contains("node is up")));
    drop(log);
    let facts = fs::read_to_string(folder.path().join("data/node.json")).unwrap_or_default();
    let facts: serde_json::Value = serde_json::from_str(&facts).unwrap_or_default();
    let get = |end: &str, path: &str| {
        let mut stream = TcpStream::connect(facts[end].as_str().unwrap()).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map(|_| answer).unwrap()
    };
    let until = Instant::now() + Duration::from_secs(20);
    let mut dropped = String::new();
    while up.is_some() && Instant::now() < until {
        // The node logs each request at that level.
        get("listen", "/time");
        let page = get("admin", "/metrics");
        let line = page.lines().find_map(|line| line.strip_prefix("fanfare_log_lines_dropped_total "));
        dropped = line.unwrap_or_default().to_owned();
        if dropped != "0" {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    node.kill().and_then(|()| node.wait()).unwrap();
    assert!(dropped.parse::<u64>().is_ok_and(|dropped| dropped > 0), "{dropped:?}");
}

#[test]
fn a_store_that_finds_no_free_file_is_not_called_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let mut printed = String::new();
    // With fewer files than these an earlier step of the start fails; in this range it is often the store.
    for files in 16..24 {
        let mut restricted = Command::new("sh");
        let program = env!("CARGO_BIN_EXE_fanfare");
        let script = format!("ulimit -n {files}; exec \"$0\" \"$@\"");
        restricted.args(["-c", &script, program, "serve", "--threads=1"]).args(ENDS);
        restricted.env_clear().current_dir(folder.path());
        printed += &until_up(folder.path(), restricted);
    }
    let reason = "the store in ./data/store cannot be opened: Too many open files";
    assert!(printed.contains(reason) && !printed.contains("damaged"), "{printed}");
}

#[test]
fn flags_before_the_command_are_refused_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let (code, _, stderr) = run(folder.path(), &["--listen", "127.0.0.1:0", "check-config"]);
    assert_eq!(code, 2);
    let printed = "fanfare: put the flags after the command: check-config [FLAGS]\n";
    assert!(stderr.ends_with(printed), "{stderr}");
}

fn until_up(folder: &Path, node: Command) -> String {
    until_written(folder, node, |printed| printed.contains("node is up"))
}

fn until_node_is_up(folder: &Path) -> String {
    until_up(folder, fanfare(folder, &[&["serve"], &ENDS[..]].concat()))
}

/// Log of a node, once it contains the expected text or the node has ended.
fn until_written(folder: &Path, mut node: Command, is_there: impl Fn(&str) -> bool) -> String {
    let log = folder.join("log");
    let mut node = node
        .stdout(Stdio::null())
        .stderr(File::create(&log).expect("the folder is writable"))
        .spawn()
        .expect("the node starts");
    let until = Instant::now() + Duration::from_secs(20);
    let printed = loop {
        let has_ended = node.try_wait().expect("a child process").is_some();
        let printed = fs::read_to_string(&log).expect("the log");
        if is_there(&printed) || has_ended || Instant::now() > until {
            break printed;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    node.kill().and_then(|()| node.wait()).expect("the node ends");
    printed
}

#[test]
fn a_log_filter_that_would_turn_the_log_off_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (filter, reason) in [
        ("warning", "`warning` is no level, did you mean warn?"),
        ("inof", "`inof` is no level, did you mean info?"),
        ("info;fanfare=debug", "`info;fanfare` is no part of the program that can log"),
    ] {
        let printed = refused(folder.path(), &["--log", filter]);
        assert!(printed.starts_with(&format!("fanfare: --log: {reason}")), "{printed}");
    }
    let (code, _, stderr) = run(folder.path(), &["check-config", "--log", " info"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
}

#[test]
fn files_of_secrets_are_checked_by_both() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("quoted", "\"a-token\"\n");
    write("empty", "\u{feff}\n");
    let scylla = ["--auth=off", "--store=scylla", "--scylla-node=127.0.0.1:1", "--scylla-user=ada"];
    for (arguments, reason) in [
        (vec!["--admin-token-file=absent"], "--admin-token-file: cannot read absent: No such file"),
        (
            vec!["--admin-token-file=empty"],
            "--admin-token-file: what empty holds is no admin token: it is not",
        ),
        (
            vec!["--admin-token-file=quoted"],
            "--admin-token-file: what quoted holds is no admin token: it stands in quotes",
        ),
        (
            [&scylla[..], &["--scylla-password-file=absent"]].concat(),
            "--scylla-password-file: cannot read absent: No such",
        ),
        (
            [&scylla[..], &["--scylla-password-file=empty"]].concat(),
            "--scylla-password-file: empty holds no password",
        ),
        (
            [&scylla[..], &["--scylla-password-file=quoted"]].concat(),
            "--scylla-password-file: what quoted holds stands in quotes",
        ),
    ] {
        let printed = refused(folder.path(), &arguments);
        assert!(printed.starts_with(&format!("fanfare: {reason}")), "{printed}");
    }
}

#[test]
fn a_whole_key_in_place_of_its_secret_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let key = "[[tenants]]\nid = 't'\n[[tenants.accounts]]\nid = 'a'\n[[tenants.accounts.keys]]\nname = 'k1'\n\
               capability = { '*' = ['publish'] }\n";
    let directory =
        |secret: &str| fs::write(folder.path().join("d.toml"), format!("{key}{secret}\n")).unwrap();
    fs::write(folder.path().join("k1.secret"), "s.e.cret.k1\n").unwrap();
    directory("secret_file = 'k1.secret'");
    let printed = refused(folder.path(), &["--directory=d.toml"]);
    let place = "fanfare: d.toml:8: tenants[0].accounts[0].keys[0].secret_file: ";
    let reason = "holds the whole key, <secret>.k1; expected is the secret alone, without .k1\n";
    assert_eq!(printed, format!("{place}{reason}"));

    directory("secret = ' secret'");
    let (code, stdout, stderr) = run(folder.path(), &["check-config", "--directory=d.toml"]);
    assert_eq!((code, stdout.as_str()), (0, "the configuration is good\n"));
    let place = "fanfare: warning: d.toml:8: tenants[0].accounts[0].keys[0].secret: ";
    assert!(stderr.starts_with(place) && stderr.contains("space"), "{stderr}");
}

#[test]
fn a_node_starts_and_logs_what_is_odd() {
    let folder = tempfile::tempdir().unwrap();
    let odd = |command: &[&str]| {
        let mut command = fanfare(folder.path(), command);
        command.env("FANFARE_VERSION", "1.0").env("FANFARE_STROE", "none");
        command
    };
    let checked = odd(&["check-config"]).output().unwrap();
    let printed = "fanfare: warning: FANFARE_STROE: is no setting and has no effect, did you mean FANFARE_STORE?\n\
                fanfare: warning: FANFARE_VERSION: is no setting and has no effect\n";
    assert_eq!(String::from_utf8(checked.stderr).unwrap(), printed);
    assert_eq!(checked.status.code(), Some(0));

    let node = odd(&[&["serve", "--log-format=json"], &ENDS[..]].concat());
    let printed = until_up(folder.path(), node);
    let odd: Vec<serde_json::Value> = printed
        .lines()
        .map(|line| serde_json::from_str(line).expect("a line of JSON"))
        .filter(|line: &serde_json::Value| line["level"] == "WARN" && !line["place"].is_null())
        .collect();
    assert!(printed.contains("node is up"), "{printed}");
    assert_eq!((odd.len(), odd[0]["place"].as_str()), (2, Some("FANFARE_STROE")), "{printed}");
    assert!(odd[0]["problem"].as_str().unwrap().ends_with("did you mean FANFARE_STORE?"), "{printed}");
}

#[test]
fn an_unread_stderr_does_not_hold_up_a_refusal() {
    const PIPE_BYTES: usize = 65_536;
    let folder = tempfile::tempdir().unwrap();
    for arguments in [&["check-config", "--log=warning"][..], &["serve", "--lisen"], &["sub"]] {
        let (_reader, mut writer) = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut writer, &[b'.'; PIPE_BYTES]).unwrap();
        let mut refusal = fanfare(folder.path(), arguments).stderr(writer).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while refusal.try_wait().unwrap().is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        let ended = refusal.try_wait().unwrap();
        refusal.kill().and_then(|()| refusal.wait()).unwrap();
        assert_eq!(ended.and_then(|status| status.code()), Some(2), "{arguments:?}");
    }
}
