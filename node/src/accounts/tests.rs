use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use parking_lot::Mutex;

use super::*;
use crate::model::{AccountId, Operation, UsageKind};
use crate::testing::DirectoryText;

const FULL: &str = r#"
[[tenants]]
id = "acme"
connection_limit = 5_000

[[tenants.accounts]]
id = "acme-prod"
retention_hours = 48
queue_limit = 20

[[tenants.accounts.channels]]
pattern = "cursor:*"
history = false
retention_hours = 24

[[tenants.accounts.channels]]
pattern = "cursor:kept"
retention_hours = 1

[[tenants.accounts.keys]]
name = "k1"
secret = "a.b.c"
status = "active"
capability = { "*" = ["subscribe", "publish"] }

[[tenants.accounts.keys]]
name = "K_2"
secret = "zzz-top-secret"
status = "revoked"
[tenants.accounts.keys.capability]
"a:*" = ["history"]

[[tenants.accounts.integrations]]
id = "orders"
kind = "webhook"
channels = ["orders:*"]
events = ["message"]
url = "https://example.com/hook"
secret = "hook-secret"

[[tenants]]
id = "other"
[[tenants.accounts]]
id = "other"
"#;

fn mistakes(text: &str) -> Vec<String> {
    match Accounts::from_text(text) {
        Err(DirectoryError::Mistakes { mistakes, .. }) => mistakes.iter().map(ToString::to_string).collect(),
        Err(error) => panic!("{error}"),
        Ok(_) => Vec::new(),
    }
}

#[test]
fn a_whole_directory_is_read() {
    let directory = Accounts::from_text(FULL).unwrap().current();
    assert_eq!(directory.tenant("acme").unwrap().connection_limit, Some(5_000));
    assert_eq!(directory.tenant("other").unwrap().connection_limit, None);
    let key = directory.key("k1").unwrap();
    assert!(key.active && key.secret.matches(b"a.b.c") && !key.secret.matches(b"a.b"));
    assert!(
        key.capability.allows("x", Operation::Publish) && !key.capability.allows("x", Operation::History)
    );
    assert!(!directory.key("K_2").unwrap().active);
    assert!(directory.key("k_2").is_none());

    let account = &key.account;
    assert_eq!((account.tenant.as_ref(), account.tenant_connection_limit), ("acme", Some(5_000)));
    assert_eq!(account.queue_limit, Some(20));
    let policy = |channel| account.policy(channel);
    assert_eq!(policy("orders:1"), ChannelPolicy { history: true, retention_hours: 48 });
    assert_eq!(policy("cursor:kept"), ChannelPolicy { history: false, retention_hours: 24 });
    let other = directory.account(&AccountId::new("other")).unwrap();
    assert_eq!(other.policy("cursor:x"), ChannelPolicy { history: true, retention_hours: 72 });

    let integration = &account.integrations[0];
    assert_eq!((integration.id.as_ref(), integration.kind), ("orders", IntegrationKind::Webhook));
    assert_eq!(integration.fields["url"].as_str(), Some("https://example.com/hook"));
    assert!(integration.messages && !integration.presence && !integration.occupancy);
}

#[test]
fn nothing_that_is_printed_holds_a_secret() {
    let directory = Accounts::from_text(FULL).unwrap().current();
    let printed = format!("{directory:?} {directory:#?}");
    for secret in ["a.b.c", "zzz-top-secret", "hook-secret"] {
        assert!(!printed.contains(secret), "{secret} in {printed}");
    }
    let broken =
        FULL.replace("\"zzz-top-secret\"", "\"zzz-top-secret").replace("status = \"active\"", "status = 1");
    let refusal = Accounts::from_text(&broken).err().unwrap();
    assert!(!format!("{refusal} {refusal:?}").contains("zzz-top"), "{refusal}");
    let refusal = Accounts::from_text(&FULL.replace("zzz-top-secret", "zzz:top")).err().unwrap();
    assert!(!format!("{refusal} {refusal:?}").contains("zzz"), "{refusal}");
}

#[test]
fn every_mistake_is_reported_at_once_with_line_and_key() {
    let text = r#"colour = "blue"
[[tenants]]
id = "Acme"
[[tenants.accounts]]
retention_hours = 0
[[tenants.accounts.keys]]
name = "k.1"
secret = "a:b"
capability = {}
[[tenants.accounts.keys]]
name = "k2"
status = "paused"
capability = { "*" = ["admin"] }
[[tenants.accounts.integrations]]
id = "x"
kind = "pigeon"
"#;
    let rule = "must be 1 to 64 of";
    let expected = [
        ("line 1: colour: ", "is not known here"),
        ("line 3: tenants[0].id: ", rule),
        ("line 4: tenants[0].accounts[0].id: ", "is missing"),
        ("line 5: tenants[0].accounts[0].retention_hours: ", "must be an integer from 1 to"),
        ("line 7: tenants[0].accounts[0].keys[0].name: ", rule),
        ("line 8: tenants[0].accounts[0].keys[0].secret: ", "must not hold a colon"),
        ("line 9: tenants[0].accounts[0].keys[0].capability: ", "grants nothing"),
        ("line 10: tenants[0].accounts[0].keys[1].secret: ", "exactly one of"),
        ("line 12: tenants[0].accounts[0].keys[1].status: ", "must be \"active\" or"),
        ("line 13: tenants[0].accounts[0].keys[1].capability: ", "unknown operation \"admin\""),
        ("line 16: tenants[0].accounts[0].integrations[0].kind: ", "must be webhook"),
    ];
    let found = mistakes(text);
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, (location, reason)) in found.iter().zip(expected) {
        assert!(found.starts_with(location) && found.contains(reason), "{found} is not {location}{reason}");
    }
}

#[test]
fn single_mistakes_are_named() {
    let account = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n";
    let key = "[[tenants.accounts.keys]]\nname = \"k\"\n";
    let map = "capability = { \"*\" = [\"publish\"] }\n";
    let hook =
        "[[tenants.accounts.integrations]]\nid=\"i\"\nkind=\"webhook\"\nurl=\"http://e.com\"\nsecret=\"s\"\n";
    let good = format!("{account}{key}secret = \"s\"\n{map}");
    assert_eq!(mistakes(&good), Vec::<String>::new());
    let cases = [
        (String::new(), "tenants: is missing"),
        ("[[tenants]\n".into(), "line 1: "),
        ("tenants = 3".into(), "must be tables"),
        (format!("{good}{key}secret = \"s\"\n{map}"), "repeats the key \"k\""),
        (format!("{account}[[tenants]]\nid = \"t\"\n"), "repeats the tenant \"t\""),
        (format!("{account}[[tenants.accounts]]\nid = \"a\"\n"), "repeats the account \"a\""),
        (format!("{account}queue_limit = \"1\""), "queue_limit: must be an integer"),
        (format!("{account}queue_limit = -1"), "queue_limit: must be an integer"),
        (format!("{account}[[tenants.accounts.channels]]\nhistory = true"), "pattern: is missing"),
        (format!("{account}[[tenants.accounts.channels]]\npattern = \"\""), "must not be empty"),
        (format!("{account}[[tenants.accounts.channels]]\npattern = \"a\"\nhistory = 1"), "true or false"),
        (format!("{good}extra = 1"), "keys[0].extra: is not known here"),
        (format!("{account}{key}{map}secret = \"s\"\nsecret_env = \"HOME\""), "exactly one of"),
        (format!("{account}{key}{map}secret = \"\""), "must not be empty"),
        (format!("{account}{key}{map}secret = \"a\\u0001\""), "control character"),
        (format!("{account}{key}{map}secret_file = \"no/such/file\""), "cannot be read"),
        (format!("{account}{key}{map}secret_env = \"FANFARE_NOT_SET_HERE\""), "not set"),
        (format!("{account}{key}secret = \"s\""), "capability: is missing"),
        (format!("{account}{key}secret = \"s\"\ncapability = []"), "capability: must be a table"),
        (format!("{account}{key}secret = \"s\"\ncapability = {{ a = \"publish\" }}"), "list of strings"),
        (format!("{account}{key}secret = \"s\"\ncapability = {{ a = [1] }}"), "must be a string"),
        (format!("{account}{hook}events=[\"x\"]"), "events: "),
        (format!("{account}{hook}channels=[\"\"]"), "channels: "),
    ];
    for (text, reason) in cases {
        let found = mistakes(&text);
        assert!(found.len() == 1 && found[0].contains(reason), "{text}\nshould say {reason}: {found:?}");
    }
}

#[test]
fn secrets_come_from_files_and_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("k.secret"), "from.file\n").unwrap();
    let text = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n\
                [[tenants.accounts.keys]]\nname = \"f\"\nsecret_file = \"k.secret\"\ncapability = { a = [\"publish\"] }\n\
                [[tenants.accounts.keys]]\nname = \"e\"\nsecret_env = \"CARGO_PKG_NAME\"\ncapability = { a = [\"publish\"] }\n";
    let path = folder.path().join("directory.toml");
    fs::write(&path, text).unwrap();
    let accounts = Accounts::open(&path, 72).unwrap();
    assert!(accounts.current().key("f").unwrap().secret.matches(b"from.file"));
    assert!(accounts.current().key("e").unwrap().secret.matches(b"fanfare"));

    fs::write(folder.path().join("k.secret"), "rotated").unwrap();
    accounts.reload_if_changed().unwrap();
    assert!(accounts.current().key("f").unwrap().secret.matches(b"rotated"));
}

/// A directory of one key `k`, whose secret is set by the line.
fn of_secret(line: &str) -> String {
    format!(
        "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n[[tenants.accounts.keys]]\nname = \"k\"\n\
         capability = {{ a = [\"publish\"] }}\n{line}\n"
    )
}

#[test]
fn secret_file_is_trimmed_and_malformed_text_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.toml");
    fs::write(&path, of_secret("secret_file = \"k.secret\"")).unwrap();
    for text in ["a.b", "a.b\n", "a.b \r\n", "\u{feff}a.b\n", "\t a.b", "\u{feff} a.b \n\n"] {
        fs::write(folder.path().join("k.secret"), text).unwrap();
        let directory = Accounts::open(&path, 72).unwrap().current();
        assert!(directory.key("k").unwrap().secret.matches(b"a.b"), "{text:?}");
        assert_eq!(directory.warnings(), []);
    }
    for (text, reason) in [
        ("\"a.b\"\n", "stands in quotes, which would be part of the secret: leave them out"),
        ("'a.b'", "stands in quotes"),
        ("a.k\n", "holds the whole key, <secret>.k; expected is the secret alone, without .k"),
        ("\u{feff}a.b.k ", "holds the whole key"),
        (" \n", "must not be empty"),
        ("a\nb", "must not hold a control character"),
    ] {
        fs::write(folder.path().join("k.secret"), text).unwrap();
        let refused = Accounts::open(&path, 72).err().unwrap().to_string();
        assert!(refused.contains(&format!("keys[0].secret_file: {reason}")), "{text:?}: {refused}");
        assert!(!refused.contains("a.b"), "{refused}");
    }
}

#[test]
fn a_variable_that_holds_the_whole_key_is_refused() {
    // Cargo sets the variable to `fanfare`, and the key has that name.
    let text = of_secret("secret_env = \"CARGO_PKG_NAME\"").replace("\"k\"", "\"fanfare\"");
    assert!(Accounts::from_text(&text).is_ok(), "the name alone may be the secret");
    let value = std::env::var("CARGO_MANIFEST_PATH").unwrap();
    let name = value.rsplit_once('.').unwrap().1;
    let text = of_secret("secret_env = \"CARGO_MANIFEST_PATH\"").replace("\"k\"", &format!("\"{name}\""));
    let refused = Accounts::from_text(&text).err().unwrap().to_string();
    assert!(refused.contains("keys[0].secret_env: holds the whole key, <secret>.toml;"), "{refused}");
    assert!(!refused.contains(&value), "{refused}");
}

#[test]
fn space_inside_the_quotes_of_the_file_is_a_warning() {
    for (secret, is_odd) in [("a b", false), (" a", true), ("a ", true), ("'a'", true), ("\\uFEFFa", true)] {
        let accounts = Accounts::from_text(&of_secret(&format!("secret = \"{secret}\""))).unwrap();
        let warnings = accounts.current().warnings().to_vec();
        assert_eq!(warnings.len(), usize::from(is_odd), "{secret}: {warnings:?}");
        if let [warning] = &warnings[..] {
            assert_eq!((warning.line, warning.key.as_str()), (8, "tenants[0].accounts[0].keys[0].secret"));
        }
    }
    let refused = Accounts::from_text(&of_secret("secret = \"a.b.k\"")).err().unwrap().to_string();
    assert!(refused.contains("keys[0].secret: holds the whole key"), "{refused}");
}

#[test]
fn retention_missing_in_the_file_comes_from_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.toml");
    let text = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n\
                [[tenants.accounts]]\nid = \"b\"\nretention_hours = 7\n";
    fs::write(&path, text).unwrap();
    let accounts = Accounts::open(&path, 5).unwrap();
    let hours =
        |id: &str| accounts.current().account(&AccountId::new(id)).unwrap().policy("c").retention_hours;
    assert_eq!((hours("a"), hours("b")), (5, 7));
    fs::write(&path, text.replace('7', "8")).unwrap();
    accounts.reload_if_changed().unwrap();
    assert_eq!((hours("a"), hours("b")), (5, 8), "after another reading too");
}

#[test]
fn a_reload_applies_what_is_good_and_keeps_the_rest_out() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.toml");
    assert!(matches!(Accounts::open(&path, 72), Err(DirectoryError::Unreadable { .. })));
    fs::write(&path, FULL).unwrap();
    let accounts = Accounts::open(&path, 72).unwrap();
    accounts.reload_if_changed().unwrap();
    assert_eq!(accounts.generation(), 1, "an unchanged file is not applied again");

    fs::write(&path, "[[tenants]]\nid = 1\n").unwrap();
    accounts.reload_if_changed().expect_err("a broken file");
    accounts.reload_if_changed().expect("it is reported once");
    accounts.reload().expect_err("unless one asks");
    fs::remove_file(&path).unwrap();
    accounts.reload_if_changed().expect_err("a missing file");
    assert!(accounts.generation() == 1 && accounts.current().key("k1").unwrap().active);

    fs::write(&path, FULL.replace("\"active\"", "\"revoked\"")).unwrap();
    accounts.reload_if_changed().unwrap();
    assert!(accounts.generation() == 2 && !accounts.current().key("k1").unwrap().active);
}

#[test]
fn a_change_of_what_channels_keep_is_counted_and_no_other_is() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("directory.toml");
    let text = |accounts: &[(&str, &str)], key: &str| {
        let mut text = DirectoryText::default();
        for (account, rule) in accounts {
            text = text.account(account).channels("a", rule);
        }
        text.key(key, r#"{ "*" = ["publish"] }"#).text().to_owned()
    };
    let (on, off) = ("history = true", "history = false");
    fs::write(&path, text(&[("one", on)], "k1")).expect("a temporary file");
    let accounts = Accounts::open(&path, 72).expect("a good directory");
    let (announced, current) = (Arc::new(Mutex::new(Vec::new())), Arc::downgrade(&accounts));
    let record = Arc::clone(&announced);
    accounts.before_policy_change(move |policies| {
        let generation = current.upgrade().expect("it is being read again").generation();
        record.lock().push((generation, policies));
    });
    for (now, key, changes, is_announced) in [
        (&[("one", on)][..], "k2", 0, false),
        (&[("one", "history = true\nretention_hours = 1")], "k2", 0, false),
        (&[("one", on), ("two", off)], "k2", 0, true),
        (&[("one", off), ("two", off)], "k2", 1, true),
        (&[("one", on), ("two", off)], "k2", 2, true),
        (&[("one", on)], "k2", 3, true),
    ] {
        fs::write(&path, text(now, key)).expect("a temporary file");
        accounts.reload().expect("a good directory");
        assert_eq!(accounts.policy_changes(), changes, "{now:?}");
        let before = accounts.generation() - 1;
        let expected = is_announced.then(|| (before, accounts.current().history_policies()));
        assert_eq!(announced.lock().drain(..).collect::<Vec<_>>(), Vec::from_iter(expected), "{now:?}");
    }
    let policies = |accounts: &[(&str, &str)]| {
        Accounts::from_text(&text(accounts, "k")).expect("a good directory").current().history_policies()
    };
    assert_eq!(policies(&[("one", on)]), policies(&[("two", on), ("one", on)]), "both keep all");
    assert_ne!(policies(&[("one", on)]), policies(&[("one", on), ("two", off)]));
    assert_ne!(policies(&[("one", off), ("two", on)]), policies(&[("one", on), ("two", off)]));
}

#[test]
fn usage_of_an_account_outlives_a_directory_reload() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.toml");
    fs::write(&path, FULL).unwrap();
    let accounts = Accounts::open(&path, 72).unwrap();
    let counted = || {
        let mut counted = Vec::new();
        accounts.usages().visit(|account, usage| {
            counted.extend(usage.take(UsageKind::Api).map(|amount| (account.to_string(), amount.count)));
        });
        counted
    };
    let previous = accounts.current().key("k1").unwrap().account.clone();
    fs::write(&path, FULL.replace("\"active\"", "\"revoked\"")).unwrap();
    accounts.reload().unwrap();
    previous.usage.count(UsageKind::Api, 1, 0);
    accounts.current().key("k1").unwrap().account.usage.count(UsageKind::Api, 1, 0);
    assert_eq!(counted(), [(previous.id.to_string(), 2)]);

    fs::write(&path, "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"new\"\n").unwrap();
    accounts.reload().unwrap();
    previous.usage.count(UsageKind::Api, 1, 0);
    let id = previous.id.clone();
    drop(previous);
    assert_eq!(counted(), [(id.to_string(), 1)], "the last of an account that is gone");
    let mut known = Vec::new();
    accounts.usages().visit(|account, _| known.push(account.to_string()));
    assert_eq!(known, ["new"]);
}

#[tokio::test]
async fn the_watch_sees_a_change_within_two_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.toml");
    fs::write(&path, FULL).unwrap();
    let accounts = Accounts::open(&path, 72).unwrap();
    fs::write(&path, FULL.replace("\"active\"", "\"revoked\"")).unwrap();
    let applied = async {
        while accounts.generation() == 1 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = accounts.clone().watch() => unreachable!("the watch never ends"),
        outcome = tokio::time::timeout(std::time::Duration::from_secs(2), applied) => outcome.unwrap(),
    }
}

#[test]
fn a_development_directory_is_made_once_and_works() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let files = development::create(&data).unwrap();
    assert!(files.created);
    assert_eq!(fs::metadata(&data).unwrap().permissions().mode() & 0o777, 0o700);
    for file in [&files.directory, &files.key_file] {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600);
    }
    let key = fs::read_to_string(&files.key_file).unwrap();
    let (secret, name) = key.trim_end().rsplit_once('.').unwrap();
    let accounts = Accounts::open(&files.directory, 72).unwrap();
    let found = accounts.current().key(name).unwrap().clone();
    assert!(found.secret.matches(secret.as_bytes()) && found.account.id.as_str() == "dev");
    assert!(Operation::ALL.into_iter().all(|operation| found.capability.allows("x", operation)));

    assert!(!development::create(&data).unwrap().created);
    assert_eq!(fs::read_to_string(&files.key_file).unwrap(), key);
    assert_eq!(fs::read_dir(&data).unwrap().count(), 2, "nothing unfinished stays behind");
}

#[test]
fn retention_cut_is_rounded_up_to_a_whole_second() {
    let policy = ChannelPolicy { history: true, retention_hours: 72 };
    let cuts = [0, 1, 500, 1_000, 1_001].map(|ms| policy.oldest_ms(72 * 3_600_000 + ms));
    assert_eq!(cuts, [0, 1_000, 1_000, 1_000, 2_000]);
    assert_eq!(policy.oldest_ms(5), 0);
}

#[test]
fn occupancy_is_an_event_that_is_asked_for() {
    let account = "[[tenants]]\nid=\"a\"\n[[tenants.accounts]]\nid=\"a\"\n[[tenants.accounts.integrations]]\nid=\"i\"\nkind=\"webhook\"\nurl=\"https://example.com\"\nsecret=\"s\"";
    for (events, expected) in [
        ("", [true, true, false]),
        ("events=[\"occupancy\"]", [false, false, true]),
        ("events=[\"occupancy\", \"message\"]", [true, false, true]),
    ] {
        let accounts = Accounts::from_text(&format!("{account}\n{events}")).unwrap();
        let directory = accounts.current();
        let account = directory.account(&AccountId::new("a")).unwrap();
        let Integration { messages, presence, occupancy, .. } = *account.integrations[0];
        assert_eq!([messages, presence, occupancy], expected, "{events}");
    }
    let error = mistakes(&format!("{account}\nevents=[\"occupied\"]")).remove(0);
    assert!(error.contains("message") && error.contains("occupancy"), "{error}");
}
