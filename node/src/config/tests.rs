mod cluster;
mod scylla;

use std::ffi::OsString;
use std::path::Path;

use clap::Command;

use super::flags::{Flags, arguments};
use super::settings::settings;
use super::*;

fn flags(given: &[&str]) -> Flags {
    let command = Command::new("fanfare").no_binary_name(true).args(arguments());
    Flags::of(&command.try_get_matches_from(given).unwrap())
}

fn environment(given: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    given.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

/// Loads with an empty data folder, unless the flags name one.
fn load(file: &str, variables: &[(&str, &str)], given: &[&str]) -> Result<Config, Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.toml");
    std::fs::write(&path, file).unwrap();
    let path = path.to_str().unwrap().to_owned();
    let data = folder.path().join("data").to_str().unwrap().to_owned();
    let mut all = vec!["--config", &path];
    if !given.contains(&"--data-dir") {
        all.extend(["--data-dir", &data]);
    }
    all.extend(given);
    let mistakes = |ConfigError(mistakes)| -> Vec<String> {
        let short = |m: &ConfigMistake| m.to_string().replace(&path, "f.toml").replace(&data, "data");
        mistakes.iter().map(short).collect()
    };
    LoadedConfig::of(&flags(&all), environment(variables)).checked().map_err(mistakes)
}

#[test]
fn nothing_given_is_the_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let data_dir = folder.path().to_str().unwrap();
    let config = LoadedConfig::of(&flags(&["--data-dir", data_dir]), []).checked().unwrap();
    assert_eq!(config, Config { data_dir: data_dir.into(), ..Config::default() });
    assert!(config.development());
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    let file =
        "listen = '127.0.0.1:1'\nadmin_listen = '127.0.0.1:1'\nnode_id = 'file'\n[limits]\nnesting = 1";
    let variables = [
        ("FANFARE_LISTEN", "127.0.0.1:2"),
        ("FANFARE_ADMIN_LISTEN", "127.0.0.1:2"),
        ("FANFARE_LIMITS_NESTING", "2"),
        ("FANFARE_NODE_ID", ""),
    ];
    let config = load(file, &variables, &["--listen", "127.0.0.1:3"]).unwrap();
    assert_eq!(config.listen.port(), 3);
    assert_eq!(config.admin_listen.port(), 2);
    assert_eq!(config.limits.nesting, 2);
    assert_eq!(config.node_id.as_deref(), Some("file"));
}

#[test]
fn every_kind_of_value_is_read_from_every_source() {
    let file = "store = 'none'\ndrain_timeout = '500ms'\nauth = 'off'\ninsecure = true\nthreads = 3\n\
                io_uring = 'off'\nlog = 'debug'\nlog_format = 'json'\n\
                webhook_allow = ['10.1.0.0/16', '[::1]:9000']\n\
                [limits]\nmessage_bytes = '128KiB'\nresume_window_ms = '60s'\npublishes_per_second = 0\nnesting = 0x10";
    let from_file = load(file, &[], &[]).unwrap();
    assert_eq!(from_file.limits.message_bytes, 128 * 1024);
    assert_eq!(from_file.limits.resume_window_ms, 60_000);
    assert_eq!(from_file.limits.publishes_per_second, 0);
    assert_eq!(from_file.limits.nesting, 16);

    let variables = [
        ("FANFARE_STORE", "none"),
        ("FANFARE_DRAIN_TIMEOUT", "500ms"),
        ("FANFARE_AUTH", "off"),
        ("FANFARE_INSECURE", "true"),
        ("FANFARE_THREADS", "3"),
        ("FANFARE_IO_URING", "off"),
        ("FANFARE_LOG", "debug"),
        ("FANFARE_LOG_FORMAT", "json"),
        ("FANFARE_WEBHOOK_ALLOW", "10.1.0.0/16, [::1]:9000"),
    ];
    let given = [
        "--store=none",
        "--drain-timeout=500ms",
        "--auth=off",
        "--insecure",
        "--threads=3",
        "--io-uring=off",
        "--log=debug",
        "--log-format=json",
        "--webhook-allow=10.1.0.0/16",
        "--webhook-allow=[::1]:9000",
    ];
    for config in [from_file, load("", &variables, &[]).unwrap(), load("", &[], &given).unwrap()] {
        assert_eq!(config.store, StoreKind::None);
        assert_eq!(config.drain_timeout, Duration::from_millis(500));
        assert_eq!((config.auth, config.insecure, config.threads), (false, true, 3));
        assert!(!config.io_uring);
        assert_eq!((config.log.as_str(), config.log_format), ("debug", LogFormat::Json));
        let allowed: Vec<_> = config.webhook_allow.iter().map(ToString::to_string).collect();
        assert_eq!(allowed, ["10.1.0.0/16", "[::1]/128:9000"]);
    }
}

#[test]
fn every_mistake_is_reported_at_once_with_its_place() {
    let file = "lisen = '127.0.0.1:1'\nstore = 'disk'\nthreads = 'many'\nauth = true\n\n[limits]\n\
                message-bytes = 1\nnesting = 500\nheartbeat_ms = -1\npings_per_second = 1.5\n[other]\n";
    let variables = [("FANFARE_LISTEN", "8080"), ("FANFARE_LIMITS_TOKEN_BYTES", "0")];
    let given = [
        "--webhook-allow",
        "10.1.2.3/16",
        "--drain-timeout",
        "soon",
        "--log",
        "a=b=c",
        "--node-id",
        "a b",
        "--admin-listen",
        "0.0.0.0:1",
    ];
    let mistakes = load(file, &variables, &given).unwrap_err();
    let expected = [
        "f.toml:1: lisen: is not known, did you mean listen?",
        "f.toml:2: store: expected embedded or none or scylla, got `disk`",
        "f.toml:3: threads: expected a whole number, got `many`",
        "f.toml:4: auth: expected a string, got a boolean",
        "f.toml:7: limits.message-bytes: is not known, did you mean limits.message_bytes?",
        "f.toml:8: limits.nesting: must be between 1 and 120, got `500`",
        "f.toml:9: limits.heartbeat_ms: expected milliseconds or a duration such as 30s, got `-1`",
        "f.toml:10: limits.pings_per_second: expected a whole number, got a float",
        "f.toml:11: other: is not known",
        "FANFARE_LIMITS_TOKEN_BYTES: must be between 1 and 65536, got `0`",
        "FANFARE_LISTEN: expected a host and a port such as 127.0.0.1:8080, got `8080`",
        "--node-id: expected 1 to 64 letters, digits, `.`, `_` or `-`, got `a b`",
        "--webhook-allow: `10.1.2.3/16` has bits of its address beyond the prefix /16",
        "--drain-timeout: expected a duration such as 500ms, 25s, 5m or 2h, got `soon`",
        "--log: `a=b` is no part of the program that can log; expected a filter such as info,fanfare=debug, parted by commas",
        "--admin-listen: 0.0.0.0:1 is beyond loopback and needs --admin-token-file",
        "--directory: data/directory.toml does not exist; name the file with tenants, accounts and keys \
         (one is made only when every listener is on loopback and there is no gossip)",
    ];
    assert_eq!(mistakes, expected);
}

#[test]
fn a_mistake_counts_even_where_it_is_overridden() {
    assert_eq!(
        load("listen = 'x'", &[], &["--listen", "127.0.0.1:0"]).unwrap_err(),
        ["f.toml:1: listen: expected a host and a port such as 127.0.0.1:8080, got `x`"]
    );
}

#[test]
fn syntax_errors_carry_their_lines() {
    let mistakes = load("listen = '127.0.0.1:0'\nstore = \nthreads = = 3\n", &[], &[]).unwrap_err();
    assert!(mistakes.iter().any(|m| m.starts_with("f.toml:2: ")), "{mistakes:?}");
    assert!(mistakes.iter().any(|m| m.starts_with("f.toml:3: ")), "{mistakes:?}");
    let twice = load("threads = 1\nthreads = 2\n", &[], &[]).unwrap_err();
    assert_eq!(twice, ["f.toml:2: threads: duplicate key"]);
    let beside = load("threads = 1\nthreads = 2\nlisten = 1\n", &[], &[]).unwrap_err();
    assert_eq!(beside.len(), 2, "{beside:?}");
}

#[test]
fn a_file_that_cannot_be_read_is_named_by_its_source() {
    let by_flag = LoadedConfig::of(&flags(&["--config", "/nowhere/f.toml"]), []).checked().unwrap_err();
    assert!(by_flag.to_string().starts_with("--config: cannot read /nowhere/f.toml: "), "{by_flag}");
    let by_variable =
        LoadedConfig::of(&flags(&[]), environment(&[("FANFARE_CONFIG", "/nowhere")])).checked().unwrap_err();
    assert!(by_variable.to_string().starts_with("FANFARE_CONFIG: cannot read /nowhere: "), "{by_variable}");
    assert_eq!(load("config = 'x'", &[], &[]).unwrap_err(), ["f.toml:1: config: is not known"]);
}

#[test]
fn auth_off_stays_on_loopback_unless_insecure() {
    let open = ["--auth=off", "--listen=0.0.0.0:0", "--directory", env!("CARGO_MANIFEST_PATH")];
    let mistakes = load("", &[], &open).unwrap_err();
    assert_eq!(mistakes.len(), 1);
    assert!(mistakes[0].starts_with("--auth: auth = off would open 0.0.0.0:0"), "{mistakes:?}");
    assert!(load("", &[], &[&open[..], &["--insecure"]].concat()).is_ok());
    let without_directory = ["--auth=off", "--insecure", "--listen=0.0.0.0:0"];
    assert!(load("", &[], &without_directory).is_ok(), "nobody is asked for a key");
    for loopback in ["127.9.9.9:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
        assert!(load("", &[], &["--auth=off", "--listen", loopback]).is_ok(), "{loopback}");
    }
}

#[test]
fn the_admin_listener_beyond_loopback_needs_a_token_file() {
    let open = ["--admin-listen=[::]:0", "--directory", env!("CARGO_MANIFEST_PATH")];
    assert_eq!(
        load("", &[], &open).unwrap_err(),
        ["--admin-listen: [::]:0 is beyond loopback and needs --admin-token-file"]
    );
    assert!(load("", &[], &[&open[..], &["--admin-token-file", "t"]].concat()).is_ok());
}

#[test]
fn a_directory_is_made_only_in_development() {
    let named = load("", &[], &["--directory", "/nowhere/d.toml"]).unwrap_err();
    assert_eq!(named, ["--directory: /nowhere/d.toml does not exist"]);
    assert!(
        load("", &[], &["--listen", "0.0.0.0:0"]).unwrap_err()[0]
            .starts_with("--directory: data/directory.toml")
    );

    let folder = tempfile::tempdir().unwrap();
    let data_dir = ["--data-dir", folder.path().to_str().unwrap()];
    std::fs::write(folder.path().join("directory.toml"), "").unwrap();
    assert!(!load("", &[], &data_dir).unwrap().development());
    assert!(load("", &[], &[&data_dir[..], &["--listen", "0.0.0.0:0"]].concat()).is_ok());
    std::fs::write(folder.path().join("dev-key"), "").unwrap();
    assert!(load("", &[], &data_dir).unwrap().development());
}

#[test]
fn an_unknown_variable_is_a_warning_with_the_nearest_name() {
    let variables = [
        ("FANFARE_VERSION", "1.0"),
        ("FANFARE_HOME", "/opt"),
        ("FANFARE_LISTEN_PORT", "80"),
        ("FANFARE_LIMITS_NESTIN", "hidden"),
        ("FANFARE_SCYLLA_NODES", "a:1"),
        ("FANFARES", "no prefix"),
        ("HOME", "elsewhere"),
    ];
    let loaded = LoadedConfig::of(&flags(&[]), environment(&variables));
    assert_eq!(loaded.mistakes, []);
    let warnings: Vec<_> = loaded.warnings.iter().map(ConfigMistake::to_string).collect();
    let expected = [
        "FANFARE_HOME: is no setting and has no effect",
        "FANFARE_LIMITS_NESTIN: is no setting and has no effect, did you mean FANFARE_LIMITS_NESTING?",
        "FANFARE_LISTEN_PORT: is no setting and has no effect, did you mean FANFARE_LISTEN?",
        "FANFARE_SCYLLA_NODES: is no setting and has no effect, did you mean FANFARE_SCYLLA_NODE?",
        "FANFARE_VERSION: is no setting and has no effect",
    ];
    assert_eq!(warnings, expected);
    let in_file = load("version = '1.0'", &[], &[]).unwrap_err();
    assert_eq!(in_file, ["f.toml:1: version: is not known"]);
}

#[test]
fn variables_of_clients_and_of_kubernetes_are_let_be() {
    let variables = [
        ("FANFARE_KEY", "a.b"),
        ("FANFARE_TOKEN", "a.b.c"),
        ("FANFARE_URL", "http://x"),
        ("FANFARE_SERVICE_HOST", "10.0.0.1"),
        ("FANFARE_SERVICE_PORT_HTTP", "80"),
        ("FANFARE_PORT", "tcp://10.0.0.1:80"),
        ("FANFARE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("FANFARE_ADMIN_PORT_8081_TCP", "tcp://10.0.0.1:8081"),
    ];
    let loaded = LoadedConfig::of(&flags(&[]), environment(&variables));
    assert_eq!((loaded.mistakes, loaded.warnings), (vec![], vec![]));
    let loaded = LoadedConfig::of(&flags(&[]), environment(&[("FANFARE_PORT", "80")]));
    assert_eq!(loaded.warnings.len(), 1, "that is what an operator sets");
}

#[test]
fn setting_names_agree_in_file_flag_and_environment() {
    for setting in settings() {
        let table = setting.table.map(|table| format!("{table}_")).unwrap_or_default();
        assert_eq!(setting.variable().to_ascii_lowercase(), format!("fanfare_{table}{}", setting.name));
        assert_eq!(setting.flag(), setting.name.replace('_', "-"));
        assert!(!setting.doc.ends_with('.') && !setting.doc.is_empty(), "{}", setting.name);
    }
}

#[test]
fn the_reference_holds_every_default() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reference.toml");
    std::fs::write(&path, reference()).unwrap();
    let entries: Vec<_> = super::file::parse("r", &reference()).into_iter().map(Result::unwrap).collect();
    let defaults = Config::default();
    for setting in settings().filter(|setting| setting.in_file()) {
        let entry = entries.iter().find(|entry| entry.setting.key() == setting.key());
        assert_eq!(entry.map(|entry| entry.text.clone()), (setting.show)(&defaults), "{}", setting.name);
    }
    let given = flags(&["--config", path.to_str().unwrap(), "--data-dir", folder.path().to_str().unwrap()]);
    let loaded = LoadedConfig::of(&given, []).checked().unwrap();
    let expected = Config { config_file: Some(path), data_dir: folder.path().into(), ..defaults };
    assert_eq!(loaded, expected);
}

#[test]
fn the_sample_is_the_reference() {
    let sample = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/fanfare.toml");
    let sample = std::fs::read_to_string(sample).unwrap();
    assert!(sample == reference(), "deploy/fanfare.toml is not what `fanfare config-reference` prints");
}

#[test]
fn operations_page_lists_every_limit_with_unit_and_default() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations/limits.md");
    let page = std::fs::read_to_string(page).unwrap();
    for setting in settings().filter(|setting| setting.table == Some("limits")) {
        let default = (setting.show)(&Config::default()).unwrap();
        let row = format!("| `{}` | {} | {default} |", setting.name, setting.value.to_ascii_lowercase());
        assert!(page.contains(&row), "docs/operations/limits.md has no row `{row}`");
    }
}

#[test]
fn a_limit_that_is_hit_is_called_as_its_setting() {
    let is_setting = |name: &str| settings().any(|own| own.table == Some("limits") && own.name == name);
    for limit in crate::telemetry::Limit::ALL {
        assert!(is_setting(limit.name()), "{limit:?}");
    }
}

#[test]
fn a_certificate_and_its_key_are_given_together() {
    let files = |config: &Config| {
        config.tls_files().map(|(certificate, key)| (certificate.to_owned(), key.to_owned()))
    };
    let both = Some(("a.crt".into(), "a.key".into()));
    assert_eq!(files(&load("", &[], &["--tls-cert=a.crt", "--tls-key=a.key"]).unwrap()), both);
    assert_eq!(files(&load("tls_cert = 'a.crt'", &[("FANFARE_TLS_KEY", "a.key")], &[]).unwrap()), both);
    assert_eq!(files(&load("", &[], &[]).unwrap()), None);
    let mistakes = load("", &[], &["--tls-cert=a.crt"]).unwrap_err();
    assert_eq!(mistakes, ["--tls-cert: needs --tls-key as well"]);
    let mistakes = load("tls_key = 'a.key'", &[], &[]).unwrap_err();
    assert_eq!(mistakes, ["f.toml:1: tls_key: needs --tls-cert as well"]);
    let mistakes = load("", &[("FANFARE_TLS_KEY", "a.key")], &[]).unwrap_err();
    assert_eq!(mistakes, ["FANFARE_TLS_KEY: needs --tls-cert as well"]);
}

#[test]
fn certificates_for_peers_are_given_all_together() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("directory.toml");
    std::fs::write(&directory, "").unwrap();
    let directory = format!("--directory={}", directory.display());
    let cluster = ["--store=none", "--gossip-listen=127.0.0.1:0", "--peer-listen=127.0.0.1:0"];
    let cluster = [&cluster[..], &["--cluster-key-file=cluster.key", &directory]].concat();
    let with = |flags: &[&str]| load("", &[], &[&cluster[..], flags].concat());
    assert_eq!(with(&[]).unwrap().peer_files(), None);
    let all = with(&["--peer-cert=a.crt", "--peer-key=a.key", "--peer-ca=ca.crt"]).unwrap();
    assert_eq!(all.peer_files(), Some(["a.crt", "a.key", "ca.crt"].map(Path::new)));
    let missing = with(&["--peer-cert=a.crt"]).unwrap_err();
    assert_eq!(missing, ["--peer-cert: needs --peer-key and --peer-ca as well"]);
    let missing = with(&["--peer-cert=a.crt", "--peer-ca=ca.crt"]).unwrap_err();
    let needs = ["--peer-cert: needs --peer-key as well", "--peer-ca: needs --peer-key as well"];
    assert_eq!(missing, needs);
    let alone = load("peer_ca = 'ca.crt'", &[], &[]).unwrap_err();
    let problem = "f.toml:1: peer_ca: is for a node of a cluster and needs --gossip-listen as well";
    assert_eq!(alone, [problem]);
}

#[test]
fn a_host_may_be_a_name() {
    let config = load("listen = 'localhost:9080'", &[], &[]).unwrap();
    assert!(config.listen.ip().is_loopback() && config.listen.port() == 9080);
    for text in [":9080", "localhost", "localhost:http", "a:b:1"] {
        let mistakes = load(&format!("listen = '{text}'"), &[], &[]).unwrap_err();
        assert!(mistakes[0].contains("expected a host and a port"), "{mistakes:?}");
    }
}

#[test]
fn no_two_listeners_have_one_address() {
    let token_file = tempfile::NamedTempFile::new().unwrap();
    let beyond = ["--directory", "/dev/null", "--admin-token-file", token_file.path().to_str().unwrap()];
    for (listen, admin, collide) in [
        ("127.0.0.1:9000", "127.0.0.1:9000", true),
        ("127.0.0.1:9000", "127.0.0.1:9001", false),
        ("127.0.0.1:0", "127.0.0.1:0", false),
        ("127.0.0.1:9000", "127.0.0.2:9000", false),
        ("0.0.0.0:9000", "127.0.0.1:9000", true),
        ("127.0.0.1:9000", "0.0.0.0:9000", true),
        ("[::]:9000", "127.0.0.1:9000", true),
        ("[::]:9000", "[::1]:9000", true),
        ("[::1]:9000", "127.0.0.1:9000", false),
        ("[::1]:9000", "0.0.0.0:9000", false),
        ("[::ffff:127.0.0.1]:9000", "127.0.0.1:9000", true),
    ] {
        let given = [&["--listen", listen, "--admin-listen", admin][..], &beyond[..]].concat();
        let mistakes = load("", &[], &given).err().unwrap_or_default();
        let expected = if collide {
            vec![format!("--admin-listen: {admin} is taken by --listen, {listen}")]
        } else {
            vec![]
        };
        assert_eq!(mistakes, expected, "{listen} and {admin}");
    }
}

#[test]
fn limits_that_contradict_one_another_are_named() {
    for (set, key, problem) in [
        ("page_limit = 1001", "page_limit", "page_limit, 1001, is more than limits.page_limit_max, 1000"),
        ("page_limit_max = 99", "page_limit_max", "page_limit, 100, is more than limits.page_limit_max, 99"),
        ("page_limit = 1001\npage_limit_max = 1001", "", ""),
        (
            "token_ttl_default_ms = 172800001",
            "token_ttl_default_ms",
            "token_ttl_default_ms, 172800001, is more than limits.token_ttl_max_ms, 172800000",
        ),
        (
            "token_ttl_max_ms = 172800001",
            "token_ttl_max_ms",
            "token_ttl_max_ms, 172800001, is more than limits.jwt_lifetime_ms, 172800000, which its tokens are held against",
        ),
        ("token_ttl_max_ms = 172800001\njwt_lifetime_ms = 172801000", "", ""),
        (
            "nonce_memory_ms = 239999",
            "nonce_memory_ms",
            "token_request_window_ms, 120000, is more than half of limits.nonce_memory_ms, 239999: a request could be used again",
        ),
        ("nonce_memory_ms = 240000", "", ""),
        (
            "message_bytes = 524289",
            "message_bytes",
            "message_bytes, 524289, is more than limits.socket_message_bytes, 524288, in which it arrives",
        ),
        ("message_bytes = 524288", "", ""),
        (
            "http_body_bytes = 65535",
            "http_body_bytes",
            "message_bytes, 65536, is more than limits.http_body_bytes, 65535, in which it arrives",
        ),
        (
            "presence_data_bytes = 524289",
            "presence_data_bytes",
            "presence_data_bytes, 524289, is more than limits.socket_message_bytes, 524288, in which it arrives",
        ),
        (
            "token_bytes = 16385",
            "token_bytes",
            "token_bytes, 16385, is more than limits.header_bytes, 16384, in which it arrives",
        ),
    ] {
        let mistakes = load(&format!("[limits]\n{set}"), &[], &[]).err().unwrap_or_default();
        let expected = if problem.is_empty() {
            vec![]
        } else {
            vec![format!("f.toml:2: limits.{key}: limits.{problem}")]
        };
        assert_eq!(mistakes, expected, "{set}");
    }
}

#[test]
fn contradicting_settings_are_reported_with_deciding_source() {
    let variable = [("FANFARE_LIMITS_PAGE_LIMIT", "2000")];
    let mistakes = load("[limits]\npage_limit = 3", &variable, &[]).unwrap_err();
    let problem = "limits.page_limit, 2000, is more than limits.page_limit_max, 1000";
    assert_eq!(mistakes, [format!("FANFARE_LIMITS_PAGE_LIMIT: {problem}")]);
    let mistakes = load("listen = '127.0.0.1:9000'\nadmin_listen = '127.0.0.1:9000'", &[], &[]).unwrap_err();
    assert_eq!(
        mistakes,
        ["f.toml:2: admin_listen: 127.0.0.1:9000 is taken by f.toml:1: listen, 127.0.0.1:9000"]
    );
    let mistakes = load("threads = 65", &[], &[]).unwrap_err();
    assert_eq!(mistakes, ["f.toml:1: threads: must be between 0 and 64, got `65`"]);
}

#[test]
fn a_delivery_window_is_0_to_50_ms() {
    for (text, expected) in [("0", Ok(0)), ("50", Ok(50)), ("51", Err("must be between 0 and 50, got `51`"))]
    {
        let variable = [("FANFARE_LIMITS_DELIVERY_WINDOW_MS", text)];
        let loaded = load("", &variable, &[]).map(|config| config.limits.delivery_window_ms);
        let expected =
            expected.map_err(|problem| vec![format!("FANFARE_LIMITS_DELIVERY_WINDOW_MS: {problem}")]);
        assert_eq!(loaded, expected);
    }
}
