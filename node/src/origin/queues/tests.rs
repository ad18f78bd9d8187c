mod upkeep;

use std::collections::HashMap;
use std::sync::Arc;

use fanfare_proto::queue::{Filter, FilterSource, QueueEdit, QueueRequest, RuleRequest};

use super::consumers::{BrokerDenial, SeenKeys, check};
use super::definitions::Definitions;
use super::*;
use crate::accounts::Accounts;
use crate::model::Capability;
use crate::origin::history::StoredQueues;
use crate::origin::outbox::{Addressee, EventSource, TargetId};

fn account() -> AccountId {
    AccountId::new("acme")
}

fn capability(text: &str) -> Capability {
    Capability::parse_json(text).expect("a capability")
}

fn everything() -> Capability {
    capability(r#"{"*":["amqp-subscribe"]}"#)
}

fn orders() -> Capability {
    capability(r#"{"orders:*":["amqp-subscribe"],"*":["subscribe"]}"#)
}

fn request(name: &str) -> QueueRequest {
    QueueRequest { name: name.to_owned(), edit: QueueEdit::default() }
}

fn rule(pattern: &str, filter: Option<Filter>) -> RuleRequest {
    RuleRequest { source_pattern: pattern.to_owned(), filter }
}

/// Creates a catalog with these definitions of the account `acme`.
fn catalog(definitions: &Definitions) -> QueueCatalog {
    let catalog = QueueCatalog::default();
    catalog.set(&account(), 1, definitions.clone());
    catalog
}

/// Rules by which a queue of the catalog receives an event; empty if none does.
fn fed(
    catalog: &QueueCatalog,
    channel: &str,
    source: EventSource,
    name: Option<&str>,
) -> Vec<Option<Arc<str>>> {
    let feeds = catalog.feeds(&account(), channel, source);
    feeds.iter().filter_map(|feed| feed.addressee(name)).map(|addressee| addressee.rule_id).collect()
}

#[test]
fn queue_is_made_and_edited_by_its_name() {
    let mut definitions = Definitions::default();
    let made = definitions.put(&account(), &request("q.1_A-b"), Some(1), &everything()).expect("made");
    assert_eq!((made.account_id.as_str(), made.enabled, made.max_length), ("acme", true, None));
    let edit = QueueEdit { max_length: Some(Some(7)), enabled: Some(false) };
    let again = QueueRequest { edit, ..request("q.1_A-b") };
    let edited = definitions.put(&account(), &again, Some(1), &everything()).expect("edited");
    assert_eq!((&edited.id, edited.max_length, edited.enabled), (&made.id, Some(7), false));
    let unchanged = definitions.edit(&made.id, QueueEdit::default(), &everything()).expect("unchanged");
    assert_eq!(unchanged, edited);
    let refused = definitions.put(&account(), &request("other"), Some(1), &everything());
    assert_eq!(refused, Err(QueueError::TooMany { queues_max: 1 }));
    for name in ["", "a b", "a:b", "a/b", "\u{e9}", &"n".repeat(129)] {
        let refused = definitions.put(&account(), &request(name), None, &everything());
        assert!(matches!(refused, Err(QueueError::Malformed(_))), "{name}");
    }
}

#[test]
fn capability_must_cover_every_pattern_before_and_after() {
    let mut definitions = Definitions::default();
    let refused = definitions.put(&account(), &request("q"), None, &orders());
    assert_eq!(refused, Err(QueueError::Forbidden), "without rules it is fed every channel");
    let mut definitions = Definitions::default();
    let queue = definitions.put(&account(), &request("q"), None, &everything()).expect("made");
    assert_eq!(definitions.covered(&queue.id, &orders()).map(drop), Err(QueueError::Forbidden));
    let first = definitions.add_rule(&queue.id, &rule("orders:eu:*", None), &everything()).expect("added");
    assert!(definitions.covered(&queue.id, &orders()).is_ok());
    let mut widened = definitions.clone();
    let refused = widened.add_rule(&queue.id, &rule("bills:*", None), &orders());
    assert_eq!(refused.map(drop), Err(QueueError::Forbidden));
    let mut emptied = definitions.clone();
    assert_eq!(emptied.remove_rule(&queue.id, &first.id, &orders()), Err(QueueError::Forbidden));
    assert_eq!(definitions.remove_rule(&queue.id, "other", &orders()), Err(QueueError::UnknownRule));
    assert_eq!(definitions.remove("other", &orders()).map(drop), Err(QueueError::UnknownQueue));
    assert_eq!(definitions.remove(&queue.id, &orders()).map(|queue| queue.name).as_deref(), Ok("q"));
}

#[test]
fn malformed_rule_is_refused_with_its_field() {
    let mut definitions = Definitions::default();
    let queue = definitions.put(&account(), &request("q"), None, &everything()).expect("made");
    let named = |name: String| Some(Filter { name: Some(name), source: None });
    for (request, expected) in [
        (rule("", None), "sourcePattern must not be empty"),
        (rule(&"p".repeat(513), None), "sourcePattern must not be longer than 512 bytes"),
        (rule("a\nb", None), "sourcePattern must not hold a control character"),
        (rule("*", named(String::new())), "filter.name must not be empty"),
        (rule("*", named("n".repeat(257))), "filter.name must not be longer than 256 bytes"),
    ] {
        let refused = definitions.add_rule(&queue.id, &request, &everything());
        assert_eq!(refused.map_err(|error| error.to_string()).map(drop), Err(expected.to_owned()));
    }
    let long = rule(&"p".repeat(512), None);
    let added = (0..10_000).map(|_| definitions.add_rule(&queue.id, &long, &everything()));
    assert!(added.into_iter().all(|added| added.is_ok()));
    assert_eq!(definitions.to_text(), Err(QueueError::TooLarge));
}

#[test]
fn queue_without_rules_is_fed_every_message() {
    let mut definitions = Definitions::default();
    let queue = definitions.put(&account(), &request("q"), None, &everything()).expect("made");
    let catalog = catalog(&definitions);
    assert_eq!(fed(&catalog, "#", EventSource::Message, None), [None]);
    assert_eq!(fed(&catalog, "a", EventSource::Presence, Some("enter")), []);
    assert!(catalog.feeds(&AccountId::new("other"), "a", EventSource::Message).is_empty());
    let feeds = catalog.feeds(&account(), "a", EventSource::Message);
    let expected = Addressee { target: TargetId::of_queue(&account(), &queue.id), rule_id: None };
    assert_eq!(feeds[0].addressee(Some("n")), Some(expected));
    let paused = QueueEdit { enabled: Some(false), ..QueueEdit::default() };
    definitions.edit(&queue.id, paused, &everything()).expect("paused");
    catalog.set(&account(), 2, definitions);
    assert!(catalog.feeds(&account(), "a", EventSource::Message).is_empty(), "it is paused");
    assert!(matches!(catalog.find(&account(), &queue.id), QueueLookup::Queue(_)), "what it is owed is sent");
}

#[test]
fn first_rule_that_matches_feeds_an_event_once() {
    let mut definitions = Definitions::default();
    let queue = definitions.put(&account(), &request("q"), None, &everything()).expect("made");
    let mut add = |pattern: &str, name: Option<&str>, source: Option<FilterSource>| -> Arc<str> {
        let filter = Filter { name: name.map(str::to_owned), source: source.map(|source| vec![source]) };
        let rule = definitions.add_rule(&queue.id, &rule(pattern, Some(filter)), &everything());
        rule.expect("added").id.into()
    };
    let paid = add("orders:*", Some("paid*"), Some(FilterSource::Message));
    let all = add("orders:*", None, Some(FilterSource::Message));
    let entered = add("room", Some("enter"), None);
    let catalog = catalog(&definitions);
    let expect = |channel, source, name, expected: Option<&Arc<str>>| {
        let expected: Vec<_> = expected.into_iter().cloned().map(Some).collect();
        assert_eq!(fed(&catalog, channel, source, name), expected, "{channel} {source:?} {name:?}");
    };
    expect("orders:1", EventSource::Message, Some("paid-late"), Some(&paid));
    expect("orders:1", EventSource::Message, Some("new"), Some(&all));
    expect("orders:1", EventSource::Message, None, Some(&all));
    expect("orders:1", EventSource::Presence, Some("enter"), None);
    expect("room", EventSource::Presence, Some("enter"), Some(&entered));
    expect("room", EventSource::Presence, Some("leave"), None);
    expect("room", EventSource::Message, None, None);
    expect("room*", EventSource::Message, Some("enter"), None);
}

#[test]
fn catalog_takes_up_what_is_newer() {
    let catalog = QueueCatalog::default();
    let mut definitions = Definitions::default();
    let queue = definitions.put(&account(), &request("q"), None, &everything()).expect("made");
    let row = |revision, definitions: &str| StoredQueues {
        account: account(),
        revision,
        definitions: definitions.into(),
    };
    let text = definitions.to_text().expect("a text");
    assert_eq!(catalog.find(&account(), &queue.id), QueueLookup::Unknown);
    catalog.apply_rows(vec![row(2, &text)]);
    assert!(matches!(catalog.find(&account(), &queue.id), QueueLookup::Queue(_)));
    catalog.apply_rows(vec![row(1, r#"{"queues":[]}"#)]);
    assert!(matches!(catalog.find(&account(), &queue.id), QueueLookup::Queue(_)));
    catalog.apply_rows(vec![row(3, "{")]);
    assert!(matches!(catalog.find(&account(), &queue.id), QueueLookup::Queue(_)));
    catalog.apply_rows(vec![row(3, r#"{"queues":[]}"#)]);
    assert_eq!(catalog.find(&account(), &queue.id), QueueLookup::Deleted);
}

const DIRECTORY: &str = r#"
    [[tenants]]
    id = "t"
    [[tenants.accounts]]
    id = "acme"
    [[tenants.accounts.keys]]
    name = "all"
    secret = "s.1"
    capability = { "*" = ["amqp-subscribe"] }
    [[tenants.accounts.keys]]
    name = "orders"
    secret = "s.2"
    capability = { "orders:*" = ["amqp-subscribe"] }
    [[tenants.accounts.keys]]
    name = "revoked"
    secret = "s.3"
    status = "revoked"
    capability = { "*" = ["amqp-subscribe"] }
    [[tenants.accounts.keys]]
    name = "lacks"
    secret = "s.4"
    capability = { "*" = ["subscribe", "publish"] }
    [[tenants.accounts]]
    id = "other"
    [[tenants.accounts.keys]]
    name = "other"
    secret = "s.5"
    capability = { "*" = ["amqp-subscribe"] }
"#;

#[test]
fn only_permitted_keys_may_consume_and_denials_have_reasons() {
    let accounts = Accounts::from_text(DIRECTORY).expect("a directory");
    let mut definitions = Definitions::default();
    definitions.put(&account(), &request("every"), None, &everything()).expect("made");
    let some = definitions.put(&account(), &request("some"), None, &everything()).expect("made");
    definitions.add_rule(&some.id, &rule("orders:*", None), &everything()).expect("added");
    let catalog = catalog(&definitions);
    let checked = |request| check(&accounts, &catalog, "/", request);
    for (username, password, expected) in [
        ("all", "s.1", Ok(())),
        ("orders", "s.2", Ok(())),
        ("all", "s.1.all", Err(BrokerDenial::BadSecret)),
        ("all", "", Err(BrokerDenial::BadSecret)),
        ("revoked", "s.3", Err(BrokerDenial::RevokedKey)),
        ("revoked", "s.1", Err(BrokerDenial::BadSecret)),
        ("lacks", "s.4", Err(BrokerDenial::NoCapability)),
        ("nobody", "s.1", Err(BrokerDenial::UnknownKey)),
    ] {
        assert_eq!(checked(BrokerRequest::User { username, password }), expected, "{username} {password}");
    }
    for (username, vhost, expected) in [
        ("all", "/", Ok(())),
        ("all", "v", Err(BrokerDenial::OtherVhost)),
        ("lacks", "/", Err(BrokerDenial::NoCapability)),
        ("nobody", "/", Err(BrokerDenial::UnknownKey)),
    ] {
        assert_eq!(checked(BrokerRequest::Vhost { username, vhost }), expected, "{username} {vhost}");
    }
    let resource = |username, kind, name, permission| {
        checked(BrokerRequest::Resource { username, vhost: "/", kind, name, permission })
    };
    for (username, name, expected) in [
        ("all", "acme:every", Ok(())),
        ("all", "acme:every:dead", Ok(())),
        ("all", "acme:some", Ok(())),
        ("orders", "acme:some", Ok(())),
        ("orders", "acme:every", Err(BrokerDenial::NotCovered)),
        ("other", "acme:every", Err(BrokerDenial::OtherAccount)),
        ("other", "other:every", Err(BrokerDenial::UnknownQueue)),
        ("revoked", "acme:every", Err(BrokerDenial::RevokedKey)),
        ("all", "acme:missing", Err(BrokerDenial::UnknownQueue)),
        ("all", "acme", Err(BrokerDenial::UnknownQueue)),
        ("all", "acme:every:dead:dead", Err(BrokerDenial::UnknownQueue)),
        ("all", "internal", Err(BrokerDenial::UnknownQueue)),
    ] {
        assert_eq!(resource(username, "queue", name, "read"), expected, "{username} {name}");
    }
    for (kind, permission) in
        [("queue", "write"), ("queue", "configure"), ("exchange", "read"), ("topic", "read")]
    {
        let refused = resource("all", kind, "acme:every", permission);
        assert_eq!(refused, Err(BrokerDenial::NotReading), "{kind} {permission}");
    }
    assert_eq!(checked(BrokerRequest::Topic { username: "all" }), Err(BrokerDenial::NotReading));
}
