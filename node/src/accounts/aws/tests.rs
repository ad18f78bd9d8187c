use std::sync::Arc;
use std::time::Duration;

use super::super::{Accounts, AwsEndpoint, DirectoryError, IntegrationTarget, LambdaTarget, SnsTarget};
use crate::model::AccountId;

const HEAD: &str = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n[[tenants.accounts.integrations]]\nid = \"i\"\n";
const KEYS: &str = "access_key_id = \"AKID\"\nsecret_access_key = \"hush\"\n";
const TOPIC: &str = "topic_arn = \"arn:aws:sns:eu-west-1:123456789012:orders\"\n";
const FUNCTION: &str = "function = \"on-orders\"\nregion = \"eu-west-1\"\n";
const ROLE: &str = "role_arn = \"arn:aws:iam::123456789012:role/team/events\"\n";

fn text(kind: &str, fields: &str) -> String {
    format!("{HEAD}kind = \"{kind}\"\n{fields}")
}

fn target(kind: &str, fields: &str) -> IntegrationTarget {
    let directory = match Accounts::from_text(&text(kind, fields)) {
        Ok(accounts) => accounts.current(),
        Err(error) => panic!("{fields}: {error}"),
    };
    directory.account(&AccountId::new("a")).expect("the account").integrations[0].target.clone()
}

fn lambda(fields: &str) -> Arc<LambdaTarget> {
    match target("lambda", fields) {
        IntegrationTarget::Lambda(target) => target,
        other => panic!("a function is expected: {other:?}"),
    }
}

fn sns(fields: &str) -> Arc<SnsTarget> {
    match target("sns", fields) {
        IntegrationTarget::Sns(target) => target,
        other => panic!("a topic is expected: {other:?}"),
    }
}

fn mistakes(text: &str) -> Vec<String> {
    match Accounts::from_text(text) {
        Err(DirectoryError::Mistakes { mistakes, .. }) => mistakes.iter().map(ToString::to_string).collect(),
        Err(error) => panic!("{error}"),
        Ok(_) => Vec::new(),
    }
}

#[test]
fn a_function_with_keys_has_defaults() {
    let target = lambda(&format!("{FUNCTION}{KEYS}"));
    assert_eq!((&*target.function, &target.qualifier), ("on-orders", &None));
    assert_eq!(&*target.access.region, "eu-west-1");
    assert_eq!(target.access.endpoint.url().as_str(), "https://lambda.eu-west-1.amazonaws.com/");
    assert!(matches!(target.access.endpoint, AwsEndpoint::OfRegion(_)));
    let credentials = &target.access.credentials;
    assert!(credentials.keys.secret.matches(b"hush") && credentials.keys.session_token.is_none());
    assert!(credentials.role.is_none());
    let batching = target.batching;
    assert_eq!((batching.events, batching.bytes, batching.parallel), (100, 192 * 1024, 8));
    assert_eq!((batching.linger, batching.timeout), (Duration::ZERO, Duration::from_secs(10)));
}

#[test]
fn arn_gives_region_and_partition() {
    for (region, host) in [
        ("us-gov-west-1", "us-gov-west-1.amazonaws.com"),
        ("cn-north-1", "cn-north-1.amazonaws.com.cn"),
        ("eusc-de-east-1", "eusc-de-east-1.amazonaws.eu"),
    ] {
        let function = format!("function = \"arn:aws-x:lambda:{region}:123456789012:function:f\"\n{KEYS}");
        let access = &lambda(&function).access;
        assert_eq!(
            (&*access.region, access.endpoint.url().host_str()),
            (region, Some(&*format!("lambda.{host}")))
        );
        let topic = format!("topic_arn = \"arn:aws-x:sns:{region}:123456789012:t.fifo\"\n{KEYS}");
        let target = sns(&topic);
        assert!(target.is_fifo());
        let access = &target.access;
        assert_eq!(
            (&*access.region, access.endpoint.url().host_str()),
            (region, Some(&*format!("sns.{host}")))
        );
    }
}

#[test]
fn every_field_of_a_topic_is_read() {
    let target = sns(&format!(
        "{TOPIC}{KEYS}{ROLE}session_token = \"hush\"\nexternal_id = \"hu:sh\"\nrole_session_name = \"events\"\n\
         sts_endpoint = \"http://localhost:5000\"\nregion = \"local\"\nendpoint = \"http://[::1]:5000\"\n\
         batch_events = 1000\nbatch_bytes = 253_952\nlinger_ms = 60_000\ntimeout_ms = 100\nparallel = 64\n"
    ));
    assert!(!target.is_fifo());
    assert_eq!(&*target.topic_arn, "arn:aws:sns:eu-west-1:123456789012:orders");
    let given = |url: &str| AwsEndpoint::Given(url.parse().expect("a URL"));
    assert_eq!((&*target.access.region, &target.access.endpoint), ("local", &given("http://[::1]:5000/")));
    let role = target.access.credentials.role.as_ref().expect("a role");
    assert_eq!(&*role.arn, "arn:aws:iam::123456789012:role/team/events");
    assert_eq!((role.external_id.as_deref(), &*role.session_name), (Some("hu:sh"), "events"));
    assert_eq!(role.endpoint, given("http://localhost:5000"));
    assert!(
        target.access.credentials.keys.session_token.as_ref().is_some_and(|token| token.matches(b"hush"))
    );
    let batching = target.batching;
    assert_eq!((batching.events, batching.bytes, batching.parallel), (1000, 253_952, 64));
    assert_eq!((batching.linger, batching.timeout), (Duration::from_secs(60), Duration::from_millis(100)));
    let printed = format!("{target:?}");
    assert!(
        !printed.contains("hush") && !printed.contains("hu:sh") && !printed.contains("AKID"),
        "{printed}"
    );
}

#[test]
fn a_function_takes_a_qualifier_and_larger_batches() {
    let target = lambda(&format!("{FUNCTION}{KEYS}{ROLE}qualifier = \"$LATEST\"\nbatch_bytes = 1_040_384\n"));
    assert_eq!((target.qualifier.as_deref(), target.batching.bytes), (Some("$LATEST"), 1_040_384));
    let role = target.access.credentials.role.as_ref().expect("a role");
    assert_eq!(role.endpoint.url().as_str(), "https://sts.eu-west-1.amazonaws.com/");
    assert_eq!((&role.external_id, &*role.session_name), (&None, "fanfare"));
}

#[test]
fn a_mistake_in_a_function_or_topic_is_named_with_its_line() {
    let function = |function: &str| format!("{KEYS}region = \"r\"\nfunction = \"{function}\"");
    let topic = |topic: &str| format!("{KEYS}topic_arn = \"{topic}\"");
    let good = format!("{TOPIC}{KEYS}");
    let endpoint = |endpoint: &str| format!("{good}endpoint = \"{endpoint}\"");
    let is_function = "must be the name of a function, or its ARN without a version or alias";
    let is_topic = "must be the ARN of a topic";
    for (kind, fields, line, key, reason) in [
        ("lambda", format!("{KEYS}region = \"r\""), 5, "function", "is missing"),
        ("lambda", function("a b"), 11, "function", is_function),
        ("lambda", function(""), 11, "function", is_function),
        ("lambda", function("arn:aws:lambda:r:123456789012:function:f:7"), 11, "function", is_function),
        ("lambda", function("arn:aws:lambda:r:123:function:f"), 11, "function", is_function),
        ("lambda", function("arn:aws:sns:r:123456789012:f"), 11, "function", is_function),
        ("lambda", format!("{KEYS}function = \"f\""), 5, "region", "is missing, and function is not an ARN"),
        ("lambda", format!("{KEYS}{FUNCTION}qualifier = \"a:b\""), 12, "qualifier", "must be a version"),
        (
            "lambda",
            format!("{KEYS}{FUNCTION}batch_bytes = 1_040_385"),
            12,
            "batch_bytes",
            "from 1024 to 1040384",
        ),
        ("lambda", format!("{KEYS}{FUNCTION}topic_arn = \"a\""), 12, "topic_arn", "is not known here"),
        ("sns", KEYS.into(), 5, "topic_arn", "is missing"),
        ("sns", topic("orders"), 10, "topic_arn", is_topic),
        ("sns", topic("arn:aws:sns:e.com/:123456789012:orders"), 10, "topic_arn", is_topic),
        ("sns", topic("arn:aws:sns:r:123456789012:a.b"), 10, "topic_arn", is_topic),
        ("sns", topic("arn:aws:sns:r:123456789012:a:subscription"), 10, "topic_arn", is_topic),
        ("sns", format!("{good}region = \"e.com/\""), 11, "region", "must be a region"),
        ("sns", format!("{good}region = \"\""), 11, "region", "must be a region"),
        ("sns", endpoint("e.com"), 11, "endpoint", "must be a URL"),
        ("sns", endpoint("ftp://e.com"), 11, "endpoint", "must begin with https:// or http://"),
        (
            "sns",
            endpoint("https://u:hush@e.com"),
            11,
            "endpoint",
            "must have no user, path, query and fragment",
        ),
        ("sns", endpoint("https://e.com/hush"), 11, "endpoint", "must have no user, path"),
        ("sns", endpoint("https://e.com?hush"), 11, "endpoint", "must have no user, path"),
        ("sns", endpoint("https://e.com:0"), 11, "endpoint", "must not have port 0"),
        (
            "sns",
            format!("{TOPIC}access_key_id = \"a\""),
            5,
            "secret_access_key",
            "one of secret_access_key, ",
        ),
        ("sns", format!("{TOPIC}secret_access_key = \"hush\""), 5, "access_key_id", "is missing beside"),
        ("sns", format!("{TOPIC}session_token = \"hush\""), 5, "access_key_id", "is missing beside"),
        ("sns", format!("{good}secret_access_key_env = \"HOME\""), 5, "secret_access_key", "exactly one of"),
        (
            "sns",
            format!("{good}session_token_file = \"no/such\""),
            11,
            "session_token_file",
            "cannot be read",
        ),
        ("sns", format!("{good}session_token_env = \"FANFARE_NOT_SET\""), 11, "session_token_env", "not set"),
        (
            "sns",
            format!("{good}role_arn = \"arn:aws:iam::123456789012:user/a\""),
            11,
            "role_arn",
            "ARN of a role",
        ),
        ("sns", format!("{good}external_id = \"hush\""), 11, "external_id", "role_arn is missing"),
        ("sns", format!("{good}sts_endpoint = \"http://e.com\""), 11, "sts_endpoint", "role_arn is missing"),
        ("sns", format!("{good}{ROLE}external_id = \"hush hush\""), 12, "external_id", "must be 2 to 1224"),
        (
            "sns",
            format!("{good}{ROLE}role_session_name = \"a:b\""),
            12,
            "role_session_name",
            "must be 2 to 64",
        ),
        ("sns", format!("{good}{ROLE}sts_endpoint = \"e.com\""), 12, "sts_endpoint", "must be a URL"),
        ("sns", format!("{good}batch_bytes = 253_953"), 11, "batch_bytes", "from 1024 to 253952"),
        ("sns", format!("{good}batch_events = 0"), 11, "batch_events", "from 1 to 1000"),
        ("sns", format!("{good}timeout_ms = 99"), 11, "timeout_ms", "from 100 to 60000"),
        ("sns", format!("{good}parallel = 65"), 11, "parallel", "from 1 to 64"),
    ] {
        let found = mistakes(&text(kind, &fields));
        let location = format!("line {line}: tenants[0].accounts[0].integrations[0].{key}: ");
        let is_named = |found: &String| found.starts_with(&location) && found.contains(reason);
        assert!(found.len() == 1 && is_named(&found[0]), "{fields}\nis not {location}{reason}: {found:?}");
        assert!(!found[0].contains("hush"), "{found:?}");
    }
}

#[test]
fn all_mistakes_of_an_integration_are_reported_at_once() {
    let fields = "function = \"f f\"\nregion = \"R\"\nendpoint = \"x\"\nrole_arn = \"r\"\nparallel = 0\n\
                  access_key_id = \"a\"\n";
    let found = mistakes(&text("lambda", fields));
    for key in ["function", "region", "endpoint", "role_arn", "parallel", "secret_access_key"] {
        assert!(found.iter().any(|found| found.contains(&format!(".{key}: "))), "{key}: {found:?}");
    }
    assert_eq!(found.len(), 6, "{found:?}");
}
