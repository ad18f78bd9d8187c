//! The binary as a user meets it: exit codes, and what goes to stdout and to stderr.

mod settings;
mod verify;
mod webhook;

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn fanfare(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fanfare"));
    command.env_clear().current_dir(folder).args(arguments);
    command
}

fn run(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = fanfare(folder, arguments).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (status.code().expect("no signal ended it"), text(stdout), text(stderr))
}

#[test]
fn wrong_use_and_wrong_configuration_are_2() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in [
        &["--lisen", "x"][..],
        &["--listen", "x"],
        &["serve", "--config", "absent.toml"],
        &["check-config", "--auth", "maybe"],
        &["nothing"],
        &["sub"],
        &["key"],
        &["pub", "demo", "-", "--id", "x"],
        &["token", "--key", "no-dot"],
        &["token", "--key", "a.b", "--ttl", "60"],
        &["sub", "demo", "--key", "a.b", "--url", "ftp://127.0.0.1"],
        &["pub", "demo", "1", "--key", "a.b", "--url", "127.0.0.1"],
    ] {
        let (code, stdout, stderr) = run(folder.path(), arguments);
        assert_eq!((code, stdout.as_str()), (2, ""), "{arguments:?}");
        assert!(!stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn every_command_takes_the_data_folder() {
    let folder = tempfile::tempdir().unwrap();
    for arguments in
        [&["check-config"][..], &["config-reference"], &["key", "new"], &["token", "--key", "-a.b"]]
    {
        let (code, _, stderr) = run(folder.path(), &[arguments, &["--data-dir", "elsewhere"]].concat());
        assert_eq!(code, 0, "{arguments:?} {stderr}");
    }
}

#[test]
fn failed_command_exits_with_1_and_reason() {
    let folder = tempfile::tempdir().unwrap();
    let refused = "cannot connect to 127.0.0.1:1: connection refused; is the node running?\n";
    for (arguments, reason) in [
        (&["sub", "demo"][..], "./data/node.json"),
        (&["pub", "demo", "1", "--url", "http://127.0.0.1:1"], "./data/dev-key"),
        (&["token", "--data-dir", "elsewhere"], "elsewhere/dev-key"),
        (&["sub", "demo", "--url", "http://127.0.0.1:1", "--key", "a.b"], refused),
        (&["pub", "demo", "1", "--url", "http://127.0.0.1:1", "--key", "a.b"], refused),
        (&["pub", "demo", "-1.5", "--key", "-a.b", "--url", "http://127.0.0.1:1"], refused),
    ] {
        let (code, stdout, stderr) = run(folder.path(), arguments);
        assert_eq!((code, stdout.as_str()), (1, ""), "{arguments:?} {stderr}");
        assert!(stderr.contains(reason), "{arguments:?} {stderr}");
    }
}

/// A folder may hold the key of a development node, which must not be sent to any other address.
#[test]
fn the_key_of_this_machine_is_sent_to_no_other() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("data")).unwrap();
    std::fs::write(folder.path().join("data/dev-key"), "secret.dev").unwrap();
    for url in
        ["http://192.0.2.1:1", "wss://node.example", "http://localhost.example:1", "http://[2001:db8::1]:1"]
    {
        let (code, _, stderr) = run(folder.path(), &["sub", "demo", "--url", url]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("another machine: give a credential for it by --key"), "{stderr}");
    }
    for url in ["http://127.0.0.1:1", "ws://localhost:1", "http://[::1]:1"] {
        let (code, _, stderr) = run(folder.path(), &["sub", "demo", "--url", url]);
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains("cannot connect to "), "{stderr}");
    }
}

#[test]
fn a_configuration_is_checked_with_all_its_mistakes() {
    let folder = tempfile::tempdir().unwrap();
    let (code, reference, _) = run(folder.path(), &["config-reference"]);
    assert_eq!(code, 0);
    std::fs::write(folder.path().join("good.toml"), reference).unwrap();
    let (code, stdout, stderr) = run(folder.path(), &["check-config", "--config", "good.toml"]);
    assert_eq!((code, stdout.as_str()), (0, "the configuration of good.toml is good\n"), "{stderr}");
    assert!(!folder.path().join("data").exists(), "checking makes nothing");

    std::fs::write(folder.path().join("bad.toml"), "lisen = ''\n[limits]\nnesting = 0\n").unwrap();
    let mut command = fanfare(folder.path(), &["check-config", "--config", "bad.toml", "--threads", "x"]);
    let output = command.env("FANFARE_STOR", "none").output().unwrap();
    let lines = "fanfare: bad.toml:1: lisen: is not known, did you mean listen?\n\
                 fanfare: bad.toml:3: limits.nesting: must be between 1 and 120, got `0`\n\
                 fanfare: --threads: expected a whole number, got `x`\n\
                 fanfare: warning: FANFARE_STOR: is no setting and has no effect, did you mean FANFARE_STORE?\n";
    assert_eq!(String::from_utf8(output.stderr).unwrap(), lines);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_directory_is_checked_with_all_its_mistakes() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("d.toml"), "[[tenants]]\nid = 'Not An Id'\n[[tenents]]\n").unwrap();
    for command in ["check-config", "serve"] {
        let (code, stdout, stderr) = run(folder.path(), &[command, "--directory", "d.toml"]);
        assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
        for place in ["fanfare: d.toml:2: ", "fanfare: d.toml:3: "] {
            assert!(stderr.contains(place), "{stderr}");
        }
    }
}

#[test]
fn a_target_that_cannot_be_delivered_to_is_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let directory = "[[tenants]]\nid = 't'\n[[tenants.accounts]]\nid = 'acme'\n\
        [[tenants.accounts.integrations]]\nid = 'hook'\nkind = 'webhook'\nsecret = 's'\nurl = 'http://u:p@localhost:9000/'\n\
        [[tenants.accounts.integrations]]\nid = 'bus'\nkind = 'sns'\naccess_key_id = 'a'\nsecret_access_key = 's'\n\
        topic_arn = 'arn:aws:sns:eu-west-1:123456789012:t'\nregion = 'us-east-1'\n";
    std::fs::write(folder.path().join("d.toml"), directory).unwrap();
    let hook = "fanfare: warning: d.toml:9: tenants[0].accounts[0].integrations[0].url: of the integration \"hook\" in the \
                account \"acme\" leads to localhost on port 9000, to which the node connects only if --webhook-allow names its address\n";
    let bus = "fanfare: warning: d.toml:16: tenants[0].accounts[0].integrations[1].region: of the integration \"bus\" in the \
               account \"acme\" is us-east-1, and topic_arn is of eu-west-1: AWS refuses such a call\n";
    let check = |allow| run(folder.path(), &["check-config", "--directory=d.toml", "--webhook-allow", allow]);
    for (allow, expected) in [("127.0.0.1:9001", format!("{hook}{bus}")), ("127.0.0.1:9000", bus.to_owned())]
    {
        let (code, stdout, stderr) = check(allow);
        assert_eq!((code, &*stdout, stderr), (0, "the configuration is good\n", expected), "{allow}");
    }
}

#[test]
fn a_command_that_is_interrupted_or_terminated_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let (sub, publish) = (&["sub", "demo"][..], &["pub", "demo", "-"][..]);
    for (arguments, signal, code) in
        [(sub, "-INT", 130), (publish, "-INT", 130), (sub, "-TERM", 143), (publish, "-TERM", 143)]
    {
        let mut command = fanfare(folder.path(), arguments);
        command.args(["--url", &url, "--key", "a.b"]).stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let connection = silent.accept().unwrap();
        let id = child.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(code), "{arguments:?} {signal}");
        drop(connection);
    }
}

#[test]
fn a_key_signs_without_a_node() {
    let folder = tempfile::tempdir().unwrap();
    let (code, stdout, _) = run(folder.path(), &["key", "new"]);
    assert_eq!(code, 0);
    let key = stdout.lines().next().unwrap();
    let (code, request, _) = run(folder.path(), &["token", "--key", key]);
    assert_eq!(code, 0);
    let request: serde_json::Value = serde_json::from_str(&request).unwrap();
    assert_eq!(request["keyName"].as_str(), key.rsplit_once('.').map(|(_, name)| name));
    assert!(!request.to_string().contains(key.rsplit_once('.').unwrap().0));
    let (code, jwt, _) = run(folder.path(), &["token", "--jwt", "--key", key]);
    assert_eq!((code, jwt.trim().split('.').count()), (0, 3));
}

#[test]
fn a_certificate_that_cannot_be_used_is_refused_by_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let pair = || rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (own, other) = (pair(), pair());
    std::fs::write(folder.path().join("node.crt"), own.cert.pem()).unwrap();
    std::fs::write(folder.path().join("node.key"), own.signing_key.serialize_pem()).unwrap();
    std::fs::write(folder.path().join("other.key"), other.signing_key.serialize_pem()).unwrap();
    let ends = ["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];
    for (certificate, key, reason) in [
        (
            "node.crt",
            "other.key",
            "--tls-key: other.key does not hold the key of the certificate in node.crt",
        ),
        ("node.key", "node.key", "--tls-cert: node.key holds no certificate"),
        ("absent.crt", "node.key", "--tls-cert: cannot read absent.crt: No such file"),
    ] {
        for command in ["serve", "check-config"] {
            let files = [format!("--tls-cert={certificate}"), format!("--tls-key={key}")];
            let files = files.each_ref().map(String::as_str);
            let (code, stdout, stderr) = run(folder.path(), &[&[command], &files[..], &ends].concat());
            assert_eq!((code, stdout.as_str()), (2, ""), "{command} {stderr}");
            assert!(stderr.contains(reason), "{command} {stderr}");
        }
    }
    let good = ["check-config", "--tls-cert=node.crt", "--tls-key=node.key"];
    let (code, stdout, stderr) = run(folder.path(), &good);
    assert_eq!((code, stdout.contains("is good")), (0, true), "{stderr}");
}

#[test]
fn unusable_peer_certificates_are_refused_naming_their_files() {
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &str, text: String| std::fs::write(folder.path().join(file), text).unwrap();
    let pair = |name: &str| {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let ca = rcgen::CertifiedIssuer::self_signed(params, key).unwrap();
        write(&format!("{name}-ca.crt"), ca.pem());
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["peer.fanfare.internal".to_owned()]).unwrap();
        write(&format!("{name}.crt"), params.signed_by(&key, &ca).unwrap().pem());
        write(&format!("{name}.key"), key.serialize_pem());
    };
    pair("node");
    pair("other");
    write("cluster.key", "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=".to_owned());
    let cluster =
        ["--gossip-listen=127.0.0.1:0", "--peer-listen=127.0.0.1:0", "--cluster-key-file=cluster.key"];
    let own = ["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--store=none", "--auth=off"];
    let run = |command: &str, [certificate, key, ca]: [&str; 3]| {
        let files =
            [format!("--peer-cert={certificate}"), format!("--peer-key={key}"), format!("--peer-ca={ca}")];
        let files = files.each_ref().map(String::as_str);
        run(folder.path(), &[&[command], &files[..], &cluster, &own].concat())
    };
    for (files, reason) in [
        (
            ["node.crt", "other.key", "node-ca.crt"],
            "--peer-key: other.key does not hold the key of the certificate in node.crt",
        ),
        (["node.crt", "node.crt", "node-ca.crt"], "--peer-key: node.crt holds no private key in PEM"),
        (["node.key", "node.key", "node-ca.crt"], "--peer-cert: node.key holds no certificate in PEM"),
        (["node.crt", "node.key", "absent.crt"], "--peer-ca: cannot read absent.crt: No such file"),
        (
            ["node.crt", "node.key", "other-ca.crt"],
            "--peer-cert: node.crt is not for peers that trust other-ca.crt",
        ),
    ] {
        for command in ["serve", "check-config"] {
            let (code, stdout, stderr) = run(command, files);
            assert_eq!((code, stdout.as_str()), (2, ""), "{command} {stderr}");
            assert!(stderr.contains(reason), "{command} {stderr}");
        }
    }
    let (code, stdout, stderr) = run("check-config", ["node.crt", "node.key", "node-ca.crt"]);
    assert_eq!((code, stdout.contains("is good")), (0, true), "{stderr}");
}

#[test]
fn mistakes_in_config_and_directory_are_reported_together() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("fanfare.toml"), "bogus = 1\ndirectory = 'directory.toml'\n").unwrap();
    let key = "[[tenants.accounts.keys]]\nname = 'k'\ncapability = {}\n";
    let directory = format!("[[tenants]]\nid = 't'\n[[tenants.accounts]]\nid = 'a'\n{key}{key}");
    std::fs::write(folder.path().join("directory.toml"), directory).unwrap();
    let (code, _, stderr) = run(folder.path(), &["check-config", "--config", "fanfare.toml"]);
    assert_eq!(code, 2);
    for mistake in ["fanfare.toml:1: bogus", "exactly one of secret", "repeats the key \"k\""] {
        assert!(stderr.contains(mistake), "{mistake}: {stderr}");
    }
}

#[test]
fn a_start_that_fails_leaves_no_data_folder_behind() {
    let folder = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    for (arguments, reason) in [
        (&["--listen", &taken, "--admin-listen", "127.0.0.1:0"][..], "(--listen)"),
        (&["--listen", "127.0.0.1:0", "--admin-listen", &taken], "(--admin-listen)"),
    ] {
        let (code, stdout, stderr) = run(folder.path(), arguments);
        assert_eq!((code, stdout.as_str()), (1, ""), "{arguments:?} {stderr}");
        assert!(stderr.contains(reason), "{arguments:?} {stderr}");
        assert!(!folder.path().join("data").exists(), "{arguments:?}");
    }
}

/// Starts a node that keeps its data where the arguments say, and waits until it is ready.
fn started(folder: &Path, arguments: &[&str], data: &str) -> Child {
    let ends = ["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"];
    let mut node = fanfare(folder, &[&ends, arguments].concat());
    let mut node = node.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    let until = Instant::now() + Duration::from_secs(20);
    while !folder.join(data).join("node.json").exists() {
        assert!(Instant::now() < until, "waited in vain for node.json");
        assert!(node.try_wait().expect("a child").is_none(), "the node ended by itself");
        std::thread::sleep(Duration::from_millis(10));
    }
    node
}

#[test]
#[cfg(target_os = "linux")]
fn a_node_has_no_huge_pages() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = started(folder.path(), &[], "data");
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.id()));
    node.kill().and_then(|()| node.wait()).expect("a child");
    let status = status.expect("it was running");
    let thp_enabled = status.lines().find_map(|line| line.strip_prefix("THP_enabled:")).map(str::trim);
    assert_eq!(thp_enabled, Some("0"));
}

#[test]
fn new_data_folder_is_private_and_existing_mode_is_kept() {
    let given = ["--data-dir=outer/data", "--admin-token-file=token", "--directory=directory.toml"];
    for arguments in [&["--data-dir=outer/data"][..], &given] {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("token"), "an-admin-token").expect("written");
        std::fs::write(folder.path().join("directory.toml"), "[[tenants]]\nid = 't'\n").expect("written");
        let mode = |path: &str| {
            let file = std::fs::metadata(folder.path().join(path)).expect("it is there");
            file.permissions().mode() & 0o777
        };
        let start_and_kill = || {
            let mut node = started(folder.path(), arguments, "outer/data");
            node.kill().and_then(|()| node.wait()).expect("a child");
        };
        start_and_kill();
        for made in ["outer", "outer/data", "outer/data/store"] {
            assert_eq!(mode(made), 0o700, "{made}");
        }
        std::fs::remove_file(folder.path().join("outer/data/node.json")).expect("it was left");
        let widened = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(folder.path().join("outer/data"), widened).expect("it is ours");
        start_and_kill();
        assert_eq!(mode("outer/data"), 0o755);
    }
}

#[test]
fn node_with_peers_refuses_missing_key_or_embedded_store() {
    let folder = tempfile::tempdir().unwrap();
    let good = [
        "serve",
        "--listen=127.0.0.1:0",
        "--admin-listen=127.0.0.1:0",
        "--gossip-listen=127.0.0.1:0",
        "--peer-listen=127.0.0.1:0",
        "--cluster-key-file=cluster.key",
        "--store=none",
        "--directory=/dev/null",
    ];
    let key =
        "--gossip-listen: needs --cluster-key-file, a file that is the same on every node: make it with";
    let embedded =
        "the embedded store is on the disk of one node and cannot be that of a cluster; say --store scylla";
    for (without, with, reason) in [
        ("--cluster-key-file", None, key.to_owned()),
        ("--store", None, format!("--gossip-listen: {embedded}")),
        ("--store", Some("--store=embedded"), format!("--store: {embedded}")),
    ] {
        let left = good.into_iter().filter(|argument| !argument.starts_with(without));
        let arguments: Vec<_> = left.chain(with).collect();
        let (code, stdout, stderr) = run(folder.path(), &arguments);
        assert_eq!((code, stdout.as_str()), (2, ""), "{arguments:?} {stderr}");
        assert!(stderr.contains(&reason), "{arguments:?} {stderr}");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 0);
}
