use std::fs;
use std::sync::Arc;
use std::time::Duration;

use super::super::{Accounts, DirectoryError, IntegrationTarget, WebhookTarget};
use crate::model::AccountId;

const HEAD: &str = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n[[tenants.accounts.integrations]]\nid = \"i\"\n";
const URL: &str = "url = \"https://example.com/hook\"\n";
const SECRET: &str = "secret = \"s\"\n";

fn text(fields: &str) -> String {
    format!("{HEAD}kind = \"webhook\"\n{fields}")
}

fn mistakes(text: &str) -> Vec<String> {
    match Accounts::from_text(text) {
        Err(DirectoryError::Mistakes { mistakes, .. }) => mistakes.iter().map(ToString::to_string).collect(),
        Err(error) => panic!("{error}"),
        Ok(_) => Vec::new(),
    }
}

fn target(accounts: &Accounts) -> Arc<WebhookTarget> {
    let directory = accounts.current();
    match &directory.account(&AccountId::new("a")).expect("the account").integrations[0].target {
        IntegrationTarget::Webhook(target) => Arc::clone(target),
        _ => panic!("a webhook is expected"),
    }
}

#[test]
fn a_webhook_with_url_and_secret_has_defaults() {
    let target = target(&Accounts::from_text(&text(&format!("{URL}{SECRET}"))).expect("a good directory"));
    assert_eq!(target.url.as_str(), "https://example.com/hook");
    assert!(target.secret.matches(b"s") && target.headers.is_empty());
    assert_eq!((target.batch_events, target.batch_bytes, target.parallel), (100, 256 * 1024, 8));
    assert_eq!((target.linger, target.timeout), (Duration::ZERO, Duration::from_secs(10)));
}

#[test]
fn every_field_of_a_webhook_is_read() {
    let fields = "url = \"http://user:hush@[::1]:8080/a?b=hush\"\nsecret = \"s.t\"\nbatch_events = 1000\n\
                  batch_bytes = 4_194_304\nlinger_ms = 60_000\ntimeout_ms = 100\nparallel = 64\n\
                  [tenants.accounts.integrations.headers]\nX-Team = \"blue\"\nx-empty = \"\"\n";
    let target = target(&Accounts::from_text(&text(fields)).expect("a good directory"));
    assert_eq!((target.url.username(), target.url.port()), ("user", Some(8080)));
    assert_eq!((target.batch_events, target.batch_bytes, target.parallel), (1000, 4 * 1024 * 1024, 64));
    assert_eq!((target.linger, target.timeout), (Duration::from_secs(60), Duration::from_millis(100)));
    assert_eq!(target.headers.get("x-team").map(|value| value.as_bytes()), Some(&b"blue"[..]));
    assert_eq!(target.headers.len(), 2);
    let printed = format!("{target:?} {:?}", target.headers);
    assert!(!printed.contains("hush") && !printed.contains("s.t") && !printed.contains("blue"), "{printed}");
}

#[test]
fn a_mistake_in_a_webhook_is_named_with_its_line() {
    let good = format!("{URL}{SECRET}");
    let url = |url: &str| format!("{SECRET}url = \"{url}\"");
    let headers = |headers: &str| format!("{good}headers = {headers}");
    for (fields, line, key, reason) in [
        (SECRET.into(), 5, "url", "is missing"),
        (format!("{SECRET}url = 1"), 9, "url", "must be a string"),
        (url("example.com/hush"), 9, "url", "must be a URL such as https://example.com/hook"),
        (url("https://hu sh/"), 9, "url", "must be a URL"),
        (url("https://1.2.3.256/hush"), 9, "url", "must be a URL"),
        (url("https://:80/hush"), 9, "url", "must be a URL"),
        (url("https://e.com:hush/"), 9, "url", "must be a URL"),
        (url("ftp://e.com/hush"), 9, "url", "must begin with https:// or http://"),
        (url("unix:/hush"), 9, "url", "must begin with https:// or http://"),
        (url("https://e.com/#hush"), 9, "url", "must not have a fragment"),
        (url("https://e.com:0/hush"), 9, "url", "must not have port 0"),
        (url(&format!("https://e.com/{}", "a".repeat(2048))), 9, "url", "must not be longer than 2048 bytes"),
        (URL.into(), 5, "secret", "exactly one of secret, secret_file and secret_env is needed"),
        (format!("{good}secret_env = \"HOME\""), 5, "secret", "exactly one of"),
        (format!("{URL}secret = \"hu:sh\""), 9, "secret", "must not hold a colon"),
        (format!("{URL}secret = \"\""), 9, "secret", "must not be empty"),
        (format!("{URL}secret_file = \"no/such/file\""), 9, "secret_file", "cannot be read"),
        (format!("{URL}secret_env = \"FANFARE_NOT_SET_HERE\""), 9, "secret_env", "not set"),
        (format!("{good}batch_events = 0"), 10, "batch_events", "must be an integer from 1 to 1000"),
        (format!("{good}batch_events = 1001"), 10, "batch_events", "must be an integer"),
        (format!("{good}batch_bytes = 1023"), 10, "batch_bytes", "must be an integer from 1024 to 4194304"),
        (format!("{good}linger_ms = 60001"), 10, "linger_ms", "must be an integer from 0 to 60000"),
        (format!("{good}timeout_ms = 99"), 10, "timeout_ms", "must be an integer from 100 to 60000"),
        (format!("{good}timeout_ms = \"1s\""), 10, "timeout_ms", "must be an integer"),
        (format!("{good}parallel = 65"), 10, "parallel", "must be an integer from 1 to 64"),
        (format!("{good}retries = 3"), 10, "retries", "is not known here"),
        (headers("\"hush\""), 10, "headers", "must be a table of names and values"),
        (headers("{ a = 1 }"), 10, "headers.\"a\"", "must be a string"),
        (headers("{ \"a b\" = \"hush\" }"), 10, "headers.\"a b\"", "is no name of a header"),
        (headers("{ a = \"hush\\n\" }"), 10, "headers.\"a\"", "must be printable ASCII"),
        (headers("{ Host = \"hush\" }"), 10, "headers.\"Host\"", "is a header that the node sets itself"),
        (headers("{ Content-Length = \"1\" }"), 10, "headers.\"Content-Length\"", "the node sets itself"),
        (headers("{ x-service-x = \"1\" }"), 10, "headers.\"x-service-x\"", "the node sets itself"),
        (headers("{ X-A = \"1\", x-a = \"2\" }"), 10, "headers.\"x-a\"", "repeats a header"),
        (
            format!("{SECRET}url = \"https://u:hush@e.com\"\nheaders = {{ authorization = \"hush\" }}"),
            5,
            "headers",
            "must not hold authorization beside a user in the url",
        ),
    ] {
        let found = mistakes(&text(&fields));
        let location = format!("line {line}: tenants[0].accounts[0].integrations[0].{key}: ");
        let is_named = |found: &String| found.starts_with(&location) && found.contains(reason);
        assert!(found.len() == 1 && is_named(&found[0]), "{fields}\nis not {location}{reason}: {found:?}");
        assert!(!found[0].contains("hush"), "{found:?}");
    }
}

#[test]
fn too_many_headers_and_long_values_are_mistakes() {
    let many: String = (0..33).map(|number| format!("x-{number} = \"1\"\n")).collect();
    let long = format!("x = \"{}\"\n", "a".repeat(4097));
    for (headers, reason) in
        [(many, "must not be more than 32"), (long, "must not be longer than 4096 bytes")]
    {
        let fields = format!("{URL}{SECRET}[tenants.accounts.integrations.headers]\n{headers}");
        let found = mistakes(&text(&fields));
        assert!(found.len() == 1 && found[0].contains(reason), "{found:?}");
    }
}

#[test]
fn a_secret_file_is_read_again_when_it_changes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("a temporary file");
    write("hook.secret", "one\n");
    write("directory.toml", &text(&format!("{URL}secret_file = \"hook.secret\"")));
    let accounts = Accounts::open(&folder.path().join("directory.toml"), 72).expect("a good directory");
    assert!(target(&accounts).secret.matches(b"one"));
    write("hook.secret", "two\n");
    accounts.reload_if_changed().expect("a good directory");
    assert!(target(&accounts).secret.matches(b"two"));
}
