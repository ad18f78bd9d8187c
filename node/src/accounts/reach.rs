//! Warnings about targets that the node accepts but cannot deliver to.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::Url;

use super::aws::{AwsAccess, AwsEndpoint};
use super::directory::IntegrationTarget;
use super::reader::{DirectoryMistakes, DirectoryValue, TableReader};
use crate::model::{AddressGuard, AllowRule, literal_address};

const URL: &str = "url";
const ENDPOINT: &str = "endpoint";
const STS_ENDPOINT: &str = "sts_endpoint";
const REGION: &str = "region";

/// The fields of an integration that a warning may be about, with their places in the file.
pub(super) struct IntegrationFields<'t, 'i>([(&'static str, Option<DirectoryValue<'t, 'i>>); 4]);

impl<'t, 'i> IntegrationFields<'t, 'i> {
    pub(super) fn of(table: &TableReader<'t, 'i>) -> Self {
        Self([URL, ENDPOINT, STS_ENDPOINT, REGION].map(|name| (name, table.peek(name))))
    }

    /// Warns of each field that keeps the node from delivering to the target with these account and target ids.
    pub(super) fn warn(
        &self,
        target: &IntegrationTarget,
        (account_id, id): (&str, &str),
        allow: Option<&[AllowRule]>,
        mistakes: &mut DirectoryMistakes<'_>,
    ) {
        for (field, fault) in faults(target, allow) {
            let value = self.0.iter().find(|(name, _)| *name == field).and_then(|(_, found)| found.as_ref());
            let Some(DirectoryValue { span, key, .. }) = value else { continue };
            let reason = format!("of the integration {id:?} in the account {account_id:?} {fault}");
            mistakes.warn(span, key, reason);
        }
    }
}

/// Fields and their faults. The texts contain only host, port and region of a field.
fn faults(target: &IntegrationTarget, allow: Option<&[AllowRule]>) -> Vec<(&'static str, String)> {
    let closed = |url| allow.and_then(|allow| closed(url, allow));
    let (urls, other_region) = match target {
        IntegrationTarget::Webhook(target) => (vec![(URL, &target.url)], None),
        IntegrationTarget::Amqp(_) => (Vec::new(), None),
        IntegrationTarget::Lambda(target) => {
            (given(&target.access), other_region("function", target.arn_region(), &target.access))
        }
        IntegrationTarget::Sns(target) => {
            (given(&target.access), other_region("topic_arn", target.arn_region(), &target.access))
        }
    };
    let closed = urls.into_iter().filter_map(|(field, url)| Some((field, closed(url)?)));
    closed.chain(other_region.map(|fault| (REGION, fault))).collect()
}

/// Addresses from the directory, to which the rules of webhooks apply.
fn given(access: &AwsAccess) -> Vec<(&'static str, &Url)> {
    let sts = access.credentials.role.as_ref().map(|role| (STS_ENDPOINT, &role.endpoint));
    let all = [(ENDPOINT, &access.endpoint)].into_iter().chain(sts);
    all.filter_map(|(field, endpoint)| match endpoint {
        AwsEndpoint::Given(url) => Some((field, url)),
        AwsEndpoint::OfRegion(_) => None,
    })
    .collect()
}

fn other_region(field: &str, of_arn: Option<&str>, access: &AwsAccess) -> Option<String> {
    let (region, of_arn) = (&*access.region, of_arn?);
    (region != of_arn).then(|| format!("is {region}, and {field} is of {of_arn}: AWS refuses such a call"))
}

/// Reason why no connection to the URL is allowed, as far as known without DNS.
fn closed(url: &Url, allow: &[AllowRule]) -> Option<String> {
    let (host, port) = (url.host_str()?, url.port_or_known_default()?);
    let guard = AddressGuard::of(allow, port);
    let addresses = match literal_address(url) {
        Some(address) => vec![address],
        None if is_localhost(host) => {
            vec![IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)]
        }
        None if guard.is_shut() => Vec::new(),
        None => return None,
    };
    let is_open = addresses.into_iter().any(|address| guard.allows(address));
    let reason = || {
        format!(
            "leads to {host} on port {port}, to which the node connects only if --webhook-allow names its address"
        )
    };
    (!is_open).then(reason)
}

/// Whether the host is a name that every system resolves to loopback.
fn is_localhost(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    host == "localhost" || host.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::accounts::Accounts;
    use crate::model::AllowRule;

    const KEYS: &str = "access_key_id = \"a\"\nsecret_access_key = \"hush\"\n";
    const TOPIC: &str = "kind = \"sns\"\ntopic_arn = \"arn:aws:sns:eu-west-1:123456789012:t\"\n";
    const FUNCTION: &str =
        "kind = \"lambda\"\nfunction = \"arn:aws:lambda:eu-west-1:123456789012:function:f\"\n";

    /// The warnings of a directory with this integration, each as line, field and reason.
    fn warnings(fields: &str, allow: &[&str]) -> Vec<(usize, String, String)> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("d.toml");
        let head = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"acme\"\n\
            [[tenants.accounts.integrations]]\nid = \"out\"\n";
        fs::write(&path, format!("{head}{fields}")).expect("written");
        let allow: Vec<AllowRule> = allow.iter().map(|rule| rule.parse().expect("a rule")).collect();
        let accounts = Accounts::open_guarded(&path, 72, &allow).expect("a good directory");
        let warnings = accounts.current().warnings().to_vec();
        let field =
            |key: &str| key.strip_prefix("tenants[0].accounts[0].integrations[0].").map(str::to_owned);
        let shown = warnings.into_iter().map(|warning| {
            (warning.line, field(&warning.key).expect("a field of the integration"), warning.reason)
        });
        shown.collect()
    }

    fn hook(url: &str) -> String {
        format!("kind = \"webhook\"\nsecret = \"hush\"\nurl = \"{url}\"\n")
    }

    #[test]
    fn webhook_that_no_rule_opens_is_a_warning() {
        let opens_all = "0.0.0.0/0";
        for (url, host, opened_by, not_by) in [
            ("http://127.0.0.1:9000/", "127.0.0.1 on port 9000", "127.0.0.1:9000", "127.0.0.1:9001"),
            ("http://2130706433/", "127.0.0.1 on port 80", "127.0.0.0/8", "127.0.0.2"),
            ("https://10.1.2.3/", "10.1.2.3 on port 443", "10.1.0.0/16", "10.2.0.0/16"),
            ("http://169.254.169.254/", "169.254.169.254 on port 80", opens_all, "10.0.0.0/8"),
            ("http://[::1]:8080/", "[::1] on port 8080", "::1", opens_all),
            ("http://[::ffff:10.0.0.1]/", "[::ffff:a00:1] on port 80", "::/0", "10.0.0.1"),
            ("http://localhost:9000/", "localhost on port 9000", "127.0.0.1", "10.0.0.0/8"),
            ("http://LOCALHOST./", "localhost. on port 80", "::1", "10.0.0.0/8"),
            ("http://hooks.localhost/", "hooks.localhost on port 80", "127.0.0.1:80", "127.0.0.1:81"),
            ("http://example.com:25/", "example.com on port 25", "10.0.0.1:25", opens_all),
            ("http://8.8.8.8:25/", "8.8.8.8 on port 25", "8.8.8.8:25", "8.8.8.8"),
        ] {
            let expected = format!(
                "of the integration \"out\" in the account \"acme\" leads to {host}, to which the node connects only if \
                 --webhook-allow names its address"
            );
            for allow in [&[][..], &[not_by]] {
                assert_eq!(
                    warnings(&hook(url), allow),
                    [(9, "url".to_owned(), expected.clone())],
                    "{url} {allow:?}"
                );
            }
            assert_eq!(warnings(&hook(url), &[opened_by]), [], "{url} {opened_by}");
        }
        for url in [
            "https://example.com/",
            "http://8.8.8.8:9000/",
            "https://[2606:4700::1111]/",
            "http://localhost.com/",
        ] {
            assert_eq!(warnings(&hook(url), &[]), [], "{url}");
        }
    }

    #[test]
    fn warning_holds_no_secret_of_the_url() {
        let url = "http://hush-user:hush-word@127.0.0.1/hush-path?hush=hush";
        let warnings = warnings(&hook(url), &[]);
        assert!(warnings.len() == 1 && !warnings[0].2.contains("hush"), "{warnings:?}");
    }

    #[test]
    fn endpoints_of_the_directory_are_held_to_the_rules() {
        let role =
            "role_arn = \"arn:aws:iam::123456789012:role/r\"\nsts_endpoint = \"http://10.0.0.1:5000\"\n";
        for kind in [TOPIC, FUNCTION] {
            let fields = format!("{kind}{KEYS}endpoint = \"http://localhost:5000\"\n{role}");
            let fields_of = |allow: &[&str]| -> Vec<_> {
                warnings(&fields, allow).into_iter().map(|(line, field, _)| (line, field)).collect()
            };
            let (endpoint, sts) = ((11, "endpoint".to_owned()), (13, "sts_endpoint".to_owned()));
            assert_eq!(fields_of(&[]), [endpoint.clone(), sts.clone()]);
            assert_eq!(fields_of(&["10.0.0.1"]), [endpoint]);
            assert_eq!(fields_of(&["127.0.0.1:5000"]), [sts]);
            assert_eq!(fields_of(&["127.0.0.1", "10.0.0.1:5000"]), []);
            assert_eq!(warnings(&format!("{kind}{KEYS}"), &[]), [], "the addresses of AWS are not guarded");
        }
    }

    #[test]
    fn region_other_than_that_of_the_arn_is_a_warning() {
        for (kind, field) in [(TOPIC, "topic_arn"), (FUNCTION, "function")] {
            let with_region = |region: &str| warnings(&format!("{kind}{KEYS}region = \"{region}\"\n"), &[]);
            let reason = format!(
                "of the integration \"out\" in the account \"acme\" is us-east-1, and {field} is of eu-west-1: AWS refuses such a call"
            );
            assert_eq!(with_region("us-east-1"), [(11, "region".to_owned(), reason)]);
            assert_eq!(with_region("eu-west-1"), []);
        }
        let named = format!("kind = \"lambda\"\nfunction = \"f\"\nregion = \"us-east-1\"\n{KEYS}");
        assert_eq!(warnings(&named, &[]), []);
    }
}
