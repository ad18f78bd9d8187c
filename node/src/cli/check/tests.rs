//! Wrong values of each setting, of each sort and from each source.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use clap::Command;

use super::*;
use crate::config::{self, flags};

#[derive(Debug, Clone, Copy)]
enum SettingKind {
    File,
    Folder,
    Address,
    Endpoints,
    Networks,
    BrokerUrl,
    ManagementUrl,
    CollectorUrl,
    Ratio,
    Host,
    NodeId,
    Keyspace,
    Name,
    Audience,
    /// A choice, tested with a misspelt word.
    Choice(&'static str),
    Switch,
    Boolean,
    Duration,
    /// A number from the first to the second.
    Count(u64, u64),
    Limit,
    Filter,
}

/// Each setting with its kind, and the settings given beside it. A setting that is missing here fails the test.
const ROWS: &[(&str, SettingKind, &[&str])] = &[
    ("config", SettingKind::File, &[]),
    ("data_dir", SettingKind::Folder, &[]),
    ("directory", SettingKind::File, &[]),
    ("listen", SettingKind::Address, &[]),
    ("tls_cert", SettingKind::File, TLS),
    ("tls_key", SettingKind::File, TLS),
    ("trusted_proxy", SettingKind::Networks, &[]),
    ("proxy_protocol", SettingKind::Switch, &["--trusted-proxy=10.0.0.0/8"]),
    ("admin_listen", SettingKind::Address, &[]),
    ("admin_token_file", SettingKind::File, &[]),
    ("node_id", SettingKind::NodeId, &[]),
    ("gossip_listen", SettingKind::Address, CLUSTER),
    ("peer_listen", SettingKind::Address, CLUSTER),
    ("advertise", SettingKind::Host, CLUSTER),
    ("seed", SettingKind::Endpoints, CLUSTER),
    ("cluster_key_file", SettingKind::File, CLUSTER),
    ("peer_cert", SettingKind::File, CLUSTER),
    ("peer_key", SettingKind::File, CLUSTER),
    ("peer_ca", SettingKind::File, CLUSTER),
    ("store", SettingKind::Choice("embeded"), &[]),
    ("scylla_node", SettingKind::Endpoints, SCYLLA),
    ("scylla_keyspace", SettingKind::Keyspace, SCYLLA),
    ("scylla_schema", SettingKind::Choice("chekc"), SCYLLA),
    ("scylla_replication", SettingKind::Count(1, 9), SCYLLA),
    ("scylla_datacenter", SettingKind::Name, SCYLLA),
    ("scylla_user", SettingKind::Name, SCYLLA),
    ("scylla_password_file", SettingKind::File, SCYLLA),
    ("webhook_allow", SettingKind::Networks, &[]),
    ("amqp_url", SettingKind::BrokerUrl, &["--amqp-management-url=http://u:p@127.0.0.1:15672"]),
    ("amqp_management_url", SettingKind::ManagementUrl, &["--amqp-url=amqp://127.0.0.1"]),
    ("drain_timeout", SettingKind::Duration, &[]),
    ("auth", SettingKind::Switch, &[]),
    ("audience", SettingKind::Audience, &[]),
    ("insecure", SettingKind::Boolean, &[]),
    ("threads", SettingKind::Count(0, 64), &[]),
    ("io_uring", SettingKind::Switch, &[]),
    ("log", SettingKind::Filter, &[]),
    ("log_format", SettingKind::Choice("jsno"), &[]),
    ("otlp_endpoint", SettingKind::CollectorUrl, &[]),
    ("trace_sample_ratio", SettingKind::Ratio, &["--otlp-endpoint=http://127.0.0.1:4318"]),
];

const TLS: &[&str] = &["--tls-cert={}/node.crt", "--tls-key={}/node.key"];
const CLUSTER: &[&str] = &[
    "--auth=off",
    "--store=none",
    "--gossip-listen=127.0.0.1:0",
    "--peer-listen=127.0.0.1:0",
    "--cluster-key-file={}/cluster.key",
    "--peer-cert={}/node.crt",
    "--peer-key={}/node.key",
    "--peer-ca={}/ca.crt",
];
const SCYLLA: &[&str] = &[
    "--auth=off",
    "--store=scylla",
    "--scylla-node=127.0.0.1:9042",
    "--scylla-user=ada",
    "--scylla-password-file={}/password",
];

fn row(key: &str) -> Option<(SettingKind, &'static [&'static str])> {
    if key.starts_with("limits.") {
        return Some((SettingKind::Limit, &[]));
    }
    ROWS.iter().find(|(name, ..)| *name == key).map(|(_, kind, beside)| (*kind, *beside))
}

#[derive(Debug, Clone)]
enum SettingInput {
    /// A text, given by any source.
    Text(String),
    /// A value as written in the file.
    Toml(&'static str),
}

#[derive(Debug, Clone)]
struct WrongSetting {
    given: SettingInput,
    /// Text that the message must contain.
    message: String,
    is_warning: bool,
}

/// Texts that are refused, from any source.
fn all(texts: &[&str], message: &str) -> Vec<WrongSetting> {
    let wrong = |text: &&str| WrongSetting {
        given: SettingInput::Text((*text).to_owned()),
        message: message.to_owned(),
        is_warning: false,
    };
    texts.iter().map(wrong).collect()
}

/// Texts that are accepted with a warning.
fn odd(texts: &[&str], message: &str) -> Vec<WrongSetting> {
    all(texts, message).into_iter().map(|wrong| WrongSetting { is_warning: true, ..wrong }).collect()
}

/// Values of another type, which only the file can express.
fn toml(values: &[&'static str], message: &str) -> Vec<WrongSetting> {
    let wrong = |value: &&'static str| WrongSetting {
        given: SettingInput::Toml(value),
        message: message.to_owned(),
        is_warning: false,
    };
    values.iter().map(wrong).collect()
}

fn wrong(kind: SettingKind, folder: &str) -> Vec<WrongSetting> {
    let [a_file, below, a_folder, bytes, link] =
        ["password", "password/x", "folder", "bytes", "link"].map(|name| format!("{folder}/{name}"));
    let no_string = toml(&["1", "true", "[1]"], "expected a string, got a");
    let (long_id, long_keyspace) = ("a".repeat(65), "a".repeat(49));
    match kind {
        SettingKind::File => [
            all(&[""], "expected a path, got nothing"),
            all(&["/nowhere/x"], "/nowhere/x"),
            all(&[&a_folder], &a_folder),
            all(&[&below], &below),
            all(&[&bytes], &bytes),
            all(&[&link], &link),
            odd(&[" a", "a\t"], "begins or ends with space"),
            no_string,
        ]
        .concat(),
        SettingKind::Folder => [
            all(&[""], "expected a path, got nothing"),
            all(&[&a_file, &below], &format!("{a_file} is a file")),
            all(&[&link], "is a link to nothing"),
            all(&["/proc/x"], "cannot make /proc/x in /proc"),
            odd(&[" a", "a\t"], "begins or ends with space"),
            no_string,
        ]
        .concat(),
        SettingKind::Address => [
            all(&["", "127.0.0.1", "127.0.0.1:", ":80", "80", "[::1]"], "expected a host and a port"),
            all(&["127.0.0.1:70000", "127.0.0.1:-1", "127.0.0.1:http"], "expected a host and a port"),
            all(&[" 127.0.0.1:0", "127.0.0.1:0 ", "http://127.0.0.1:0"], "expected a host and a port"),
            no_string,
        ]
        .concat(),
        SettingKind::Endpoints => [
            all(
                &["", " ", ",", "a:1,", "a", "a:", ":1", "a:0", "a:70000", "a:-1"],
                "expected a host and a port",
            ),
            all(&["a b:1", "http://a:1", "a:1;b:1"], "expected a host and a port"),
            toml(&["1", "true"], "expected a list of strings, got a"),
            toml(&["[1]"], "expected a string, got an integer"),
        ]
        .concat(),
        SettingKind::Host => [
            all(
                &["", " a", "a ", "a:80", "http://a", "[::1]"],
                "expected a name or an address without a port",
            ),
            all(&["0.0.0.0", "::", "::ffff:0.0.0.0"], "which stands for all addresses"),
            no_string,
        ]
        .concat(),
        SettingKind::NodeId => {
            [all(&["", " a", "a ", "a b", "é", &long_id], "expected 1 to 64 letters"), no_string].concat()
        }
        SettingKind::Keyspace => {
            [all(&["", " a", "a ", "A", "1", "a-b", &long_keyspace], "expected 1 to 48"), no_string].concat()
        }
        SettingKind::Name | SettingKind::Audience => {
            [all(&["", " ", " a", "a ", "a\nb"], "without outer space and control characters"), no_string]
                .concat()
        }
        _ => wrong_value(kind, no_string),
    }
}

/// Wrong values of the kinds that name no file or address.
fn wrong_value(kind: SettingKind, no_string: Vec<WrongSetting>) -> Vec<WrongSetting> {
    match kind {
        SettingKind::BrokerUrl => [
            all(&["a", "127.0.0.1:5672", "://"], "must be a URL such as amqp://"),
            all(&["http://127.0.0.1"], "must begin with amqp:// or amqps://"),
            all(&["amqp://127.0.0.1/a/b", "amqps://127.0.0.1/%zz"], "must have the name of a vhost"),
            no_string,
        ]
        .concat(),
        SettingKind::ManagementUrl => [
            all(&["a", "127.0.0.1:15672", "://"], "must be a URL such as http://"),
            all(&["amqp://127.0.0.1"], "must begin with http:// or https://"),
            all(&["http://127.0.0.1?a", "http://127.0.0.1#a"], "must have neither a query nor a fragment"),
            no_string,
        ]
        .concat(),
        SettingKind::CollectorUrl => [
            all(&["a", "127.0.0.1:4318", "://"], "must be a URL such as http://"),
            all(&["grpc://127.0.0.1:4317"], "must begin with http:// or https://"),
            all(&["http://127.0.0.1:0"], "must name a host and a port"),
            all(&["http://u:p@127.0.0.1"], "must not hold a user"),
            all(&["http://127.0.0.1?a", "http://127.0.0.1#a"], "must have neither a query nor a fragment"),
            no_string,
        ]
        .concat(),
        SettingKind::Ratio => [
            all(&["", "half", "-0.1", "1.01", "nan", "50%"], "expected a number from 0 to 1"),
            toml(&["true", "[1]"], "expected a number, got a"),
            toml(&["1.5", "-1", "2"], "expected a number from 0 to 1"),
        ]
        .concat(),
        SettingKind::Networks => [
            all(
                &["", " ", ",", "::1,", "a", "10.0.0.1:0", "10.0.0.0/33"],
                "expected an address or a network",
            ),
            all(&["10.0.0.1/8", "[fd00::1]/8:443"], "bits of its address beyond the prefix /8"),
            toml(&["1", "true"], "expected a list of strings, got a"),
            toml(&["[1]"], "expected a string, got an integer"),
        ]
        .concat(),
        SettingKind::Choice(misspelt) => {
            [all(&["", " auto", "none ", "NONE", "AUTO", misspelt], " or "), no_string].concat()
        }
        SettingKind::Switch => {
            [all(&["", " on", "off ", "ON", "of", "true", "1"], "expected on or off"), no_string].concat()
        }
        SettingKind::Boolean => [
            all(&["", " true", "false ", "True", "ture", "on", "1"], "expected true or false"),
            toml(&["1", "[true]"], "expected true or false, got a"),
        ]
        .concat(),
        SettingKind::Duration => [
            all(&["", "25", " 25s", "25s ", "25 s", "-1s", "1.5s", "1d", "s"], "expected a duration such as"),
            all(&["99999999999999999999s"], "expected a duration such as"),
            all(&["25h", "18446744073709551615ms"], "must be between 0s and 24h"),
            no_string,
        ]
        .concat(),
        SettingKind::Count(least, most) => {
            let range = format!("must be between {least} and {most}");
            let below = least.checked_sub(1).map(|below| all(&[&below.to_string()], &range));
            [
                all(&["", "many", "-1", "+1", "1.5", " 1", "1 "], "expected a whole number, got `"),
                all(&[&(most + 1).to_string(), "9000000000000000000"], &range),
                all(&["99999999999999999999"], "99999999999999999999 is too large"),
                toml(&["1.5", "true", "[1]"], "expected a whole number, got a"),
                below.unwrap_or_default(),
            ]
            .concat()
        }
        SettingKind::Limit => [
            all(&["", "many", "-1", "+1", "1.5", " 1", "1 "], "expected "),
            all(&["9000000000000000000"], "must be between "),
            all(&["99999999999999999999"], "99999999999999999999 is too large"),
            toml(&["1.5", "true", "[1]"], "expected a whole number, got a"),
            toml(&["-1"], "got `-1`"),
        ]
        .concat(),
        SettingKind::Filter => [
            all(&["", " ", "warning", "inof", "info,", "fanfare", "fanfare=", "fanfare=inof"], "is no level"),
            all(&["info;fanfare=debug", "a=b=info", "=info"], "is no part of the program that can log"),
            odd(&["scylla=debug"], "leaves out most lines"),
            odd(&["info,fanfaer=debug"], "did you mean fanfare?"),
            no_string,
        ]
        .concat(),
        _ => Vec::new(),
    }
}

/// A folder with a valid file for each setting that names one, and with invalid ones.
fn files() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).expect("written");
    let key = rcgen::KeyPair::generate().expect("a key");
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = rcgen::CertifiedIssuer::self_signed(params, key).expect("a CA");
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec!["peer.fanfare.internal".to_owned()]).expect("good names");
    write("ca.crt", ca.pem().as_bytes());
    write("node.crt", params.signed_by(&key, &ca).expect("signed").pem().as_bytes());
    write("node.key", key.serialize_pem().as_bytes());
    write("cluster.key", b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n");
    write("password", b"a password\n");
    write("bytes", &[0xff, 0xfe, 0, b'a', b'\n']);
    fs::create_dir(folder.path().join("folder")).expect("made");
    std::os::unix::fs::symlink("nothing", folder.path().join("link")).expect("linked");
    folder
}

fn found(
    folder: &Path,
    file: Option<&str>,
    variable: Option<(&str, &str)>,
    given: &[String],
) -> ConfigFindings {
    let mut given = given.to_vec();
    let is_given = |flag: &str| given.iter().any(|given| given.starts_with(flag));
    if !is_given("--data-dir=") && variable.is_none_or(|(name, _)| name != "FANFARE_DATA_DIR") {
        let is_in_file = file.is_some_and(|text| text.starts_with("data_dir"));
        given.extend((!is_in_file).then(|| format!("--data-dir={}/data", folder.display())));
    }
    if let Some(text) = file {
        let path = folder.join("f.toml");
        fs::write(&path, text).expect("written");
        given.push(format!("--config={}", path.display()));
    }
    let command = Command::new("test").no_binary_name(true).args(flags::arguments());
    let given = flags::Flags::of(&command.try_get_matches_from(given).expect("good flags"));
    let variable = variable.map(|(name, value)| (OsString::from(name), OsString::from(value)));
    ConfigFindings::in_all(&LoadedConfig::of(&given, variable))
}

#[test]
fn every_setting_with_a_wrong_value_of_any_sort_is_named() {
    let files = files();
    let folder = files.path();
    let mut silent = Vec::new();
    for (key, variable, flag) in config::names() {
        let Some((kind, beside)) = row(&key) else {
            silent.push(format!("{key} is in no row of the table"));
            continue;
        };
        let own = flag.clone().map(|flag| format!("{flag}="));
        let beside: Vec<String> = beside
            .iter()
            .filter(|beside| own.as_ref().is_none_or(|own| !beside.starts_with(own.as_str())))
            .map(|beside| beside.replace("{}", &folder.to_string_lossy()))
            .collect();
        let values = wrong(kind, &folder.to_string_lossy());
        assert!(!values.is_empty(), "{key} has no wrong value");
        for wrong in values {
            let in_file = |value: &str| match key.strip_prefix("limits.") {
                Some(name) => format!("[limits]\n{name} = {value}\n"),
                None => format!("{key} = {value}\n"),
            };
            let mut results: Vec<(&str, ConfigFindings)> = Vec::new();
            match &wrong.given {
                SettingInput::Toml(value) if key != "config" => {
                    results.push((value, self::found(folder, Some(&in_file(value)), None, &beside)));
                }
                SettingInput::Toml(_) => {}
                SettingInput::Text(text) => {
                    if key != "config" {
                        let value = toml::Value::from(text.as_str()).to_string();
                        results.push((
                            "in the file",
                            self::found(folder, Some(&in_file(&value)), None, &beside),
                        ));
                    }
                    // An empty variable counts as not given.
                    if !text.is_empty() {
                        results
                            .push(("variable", self::found(folder, None, Some((&variable, text)), &beside)));
                    }
                    if let Some(own) = &own {
                        let flags = [&beside[..], &[format!("{own}{text}")]].concat();
                        results.push(("flag", self::found(folder, None, None, &flags)));
                    }
                }
            }
            for (source, found) in results {
                let reported = if wrong.is_warning { &found.warnings } else { &found.mistakes };
                let is_named = |location: &str| {
                    location == variable
                        || Some(location) == flag.as_deref()
                        || location.ends_with(&format!(": {key}"))
                };
                if !reported.iter().any(|one| is_named(&one.location) && one.problem.contains(&wrong.message))
                {
                    let lines: Vec<_> =
                        found.mistakes.iter().chain(&found.warnings).map(ToString::to_string).collect();
                    silent.push(format!("{key}, {source}, {wrong:?}: {lines:?}"));
                }
            }
        }
    }
    assert!(silent.is_empty(), "{} values\n{}", silent.len(), silent.join("\n"));
}

#[test]
fn settings_with_their_companions_have_no_mistakes() {
    let files = files();
    for beside in [&[][..], TLS, CLUSTER, SCYLLA] {
        let beside: Vec<_> =
            beside.iter().map(|beside| beside.replace("{}", &files.path().to_string_lossy())).collect();
        let found = found(files.path(), None, None, &beside);
        assert_eq!((found.mistakes, found.warnings), (vec![], vec![]), "{beside:?}");
    }
    for (key, ..) in ROWS {
        assert!(config::names().any(|(name, ..)| name == *key), "{key} is no setting");
    }
}
