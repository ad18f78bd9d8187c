//! AMQP targets: their settings, and how these are read.

use std::time::Duration;

use fanfare_proto::path::encode_channel;
use sha2::{Digest as _, Sha256};

use super::reader::{DirectoryMistakes, DirectoryValue, TableReader};
use crate::model::{AccountId, AmqpUrl};

/// Bound of the names of exchanges and of routing keys.
const NAME_BYTES_MAX: usize = 255;
const DIGEST_BYTES: usize = 16;

/// The broker, exchange and routing key to which events are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AmqpTarget {
    pub url: AmqpUrl,
    /// An empty name is the default exchange, whose routing keys are names of queues.
    pub exchange: Template,
    pub routing_key: Template,
    /// Maximal number of events in one message.
    pub batch_events: usize,
    /// Maximal size of one message in bytes; a larger event is a message of its own.
    pub batch_bytes: usize,
    /// Time for which the first event of a batch waits for others.
    pub linger: Duration,
    /// Time from the sending of a message to the broker's confirmation.
    pub timeout: Duration,
    /// Channels with unconfirmed messages at a time.
    pub parallel: usize,
}

/// A text with placeholders for parts of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    parts: Vec<TemplatePart>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum TemplatePart {
    Text(Box<str>),
    Account,
    Channel,
    Source,
}

/// The parts of an event that a template may have.
#[derive(Debug, Clone, Copy)]
pub struct TemplateValues<'a> {
    pub account_id: &'a AccountId,
    pub channel: &'a str,
    /// `channel.message` or `channel.presence`.
    pub source: &'a str,
}

impl Template {
    fn parse(text: &str) -> Result<Self, String> {
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            if at > 0 {
                parts.push(TemplatePart::Text(rest[..at].into()));
            }
            let end = rest[at..].find('}').filter(|_| rest[at..].starts_with('{'));
            let Some(end) = end else { return Err("has a brace without its counterpart".to_owned()) };
            parts.push(match &rest[at + 1..at + end] {
                "account" => TemplatePart::Account,
                "channel" => TemplatePart::Channel,
                "source" => TemplatePart::Source,
                _ => return Err("may hold {account}, {channel} and {source}".to_owned()),
            });
            rest = &rest[at + end + 1..];
        }
        if !rest.is_empty() {
            parts.push(TemplatePart::Text(rest.into()));
        }
        Ok(Self { parts })
    }

    /// The text with the parts of this event, at most 255 bytes long. A channel is percent-encoded, so that it has no dot, star or hash,
    /// which separate and match the words of a routing key. A longer text is cut, and ends in `~` and a digest of the whole.
    pub fn fill(&self, values: TemplateValues<'_>) -> String {
        let mut text = String::new();
        for part in &self.parts {
            match part {
                TemplatePart::Text(part) => text.push_str(part),
                TemplatePart::Account => text.push_str(values.account_id.as_str()),
                TemplatePart::Channel => text.push_str(&as_word(values.channel)),
                TemplatePart::Source => text.push_str(values.source),
            }
        }
        if text.len() <= NAME_BYTES_MAX {
            return text;
        }
        let digest = Sha256::digest(text.as_bytes());
        let digest: String = digest.iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect();
        let mut kept = NAME_BYTES_MAX - digest.len() - 1;
        while !text.is_char_boundary(kept) {
            kept -= 1;
        }
        text.truncate(kept);
        format!("{text}~{digest}")
    }
}

/// One word of a routing key.
fn as_word(channel: &str) -> String {
    encode_channel(channel).replace('.', "%2E").replace('*', "%2A").replace('#', "%23")
}

/// Reads the rest of an integration's table and reports its mistakes.
pub(super) fn read(
    mut table: TableReader<'_, '_>,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<AmqpTarget> {
    let url = table.required("url", mistakes).and_then(|found| read_url(&found, mistakes));
    let exchange = table.required("exchange", mistakes).and_then(|found| template(&found, mistakes));
    let routing_key = match table.get("routing_key") {
        Some(found) => template(&found, mistakes),
        None => Some(Template { parts: vec![TemplatePart::Channel] }),
    };
    let mut number = |name, range, default: u64| table.integer(name, range, mistakes).unwrap_or(default);
    let batch_events = number("batch_events", 1..=1000, 1);
    let batch_bytes = number("batch_bytes", 1024..=4 * 1024 * 1024, 256 * 1024);
    let linger = Duration::from_millis(number("linger_ms", 0..=60_000, 0));
    let timeout = Duration::from_millis(number("timeout_ms", 100..=60_000, 30_000));
    let parallel = number("parallel", 1..=256, 64);
    table.finish(mistakes);
    let size = |number: u64| usize::try_from(number).ok();
    Some(AmqpTarget {
        url: url?,
        exchange: exchange?,
        routing_key: routing_key?,
        batch_events: size(batch_events)?,
        batch_bytes: size(batch_bytes)?,
        linger,
        timeout,
        parallel: size(parallel)?,
    })
}

fn read_url(found: &DirectoryValue<'_, '_>, mistakes: &mut DirectoryMistakes<'_>) -> Option<AmqpUrl> {
    let url = AmqpUrl::parse(found.text(mistakes)?);
    url.map_err(|reason| mistakes.add(&found.span, &found.key, reason)).ok()
}

fn template(found: &DirectoryValue<'_, '_>, mistakes: &mut DirectoryMistakes<'_>) -> Option<Template> {
    let text = found.text(mistakes)?;
    let template = match text {
        _ if text.len() > NAME_BYTES_MAX => Err(format!("must not be longer than {NAME_BYTES_MAX} bytes")),
        _ if text.chars().any(char::is_control) => Err("must not hold a control character".to_owned()),
        _ => Template::parse(text),
    };
    template.map_err(|reason| mistakes.add(&found.span, &found.key, reason)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::{Accounts, IntegrationTarget};

    const HEAD: &str = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n\
        [[tenants.accounts.integrations]]\nid = \"i\"\nkind = \"amqp\"\n";
    const URL: &str = "url = \"amqp://u:hush@broker/%2f\"\n";

    fn read(fields: &str) -> Result<AmqpTarget, String> {
        let accounts = Accounts::from_text(&format!("{HEAD}{fields}")).map_err(|error| error.to_string())?;
        let directory = accounts.current();
        let account = directory.account(&AccountId::new("a")).expect("the account");
        match &account.integrations[0].target {
            IntegrationTarget::Amqp(target) => Ok(AmqpTarget::clone(target)),
            other => Err(format!("an AMQP target is expected: {other:?}")),
        }
    }

    fn fill(template: &str, channel: &str) -> String {
        let account_id = &AccountId::new("acme");
        let values = TemplateValues { account_id, channel, source: "channel.message" };
        Template::parse(template).expect(template).fill(values)
    }

    #[test]
    fn settings_have_defaults() {
        let target = read(&format!("{URL}exchange = \"events\"\n")).expect("a target");
        assert_eq!((target.batch_events, target.parallel), (1, 64));
        assert_eq!(target.routing_key, Template::parse("{channel}").expect("a template"));
        assert!(!format!("{target:?}").contains("hush"));
    }

    #[test]
    fn mistakes_are_reported_with_their_field() {
        let exchange = "exchange = \"e\"\n";
        for (fields, expected) in [
            (exchange.to_owned(), "url: is missing"),
            (URL.to_owned(), "exchange: is missing"),
            (format!("url = \"http://hush\"\n{exchange}"), "url: must begin with amqp:// or amqps://"),
            (
                format!("{URL}exchange = \"{{kind}}\"\n"),
                "exchange: may hold {account}, {channel} and {source}",
            ),
            (
                format!("{URL}{exchange}routing_key = \"a}}b\"\n"),
                "routing_key: has a brace without its counterpart",
            ),
            (format!("{URL}{exchange}routing_key = \"a{{channel\"\n"), "routing_key: has a brace without"),
            (format!("{URL}{exchange}parallel = 0\n"), "parallel: must be an integer from 1 to 256"),
            (format!("{URL}{exchange}secret = \"hush\"\n"), "secret: is not known here"),
        ] {
            let mistakes = read(&fields).expect_err(&fields);
            assert!(mistakes.contains(expected) && !mistakes.contains("hush"), "{fields}: {mistakes}");
        }
    }

    #[test]
    fn channel_is_one_word_of_a_routing_key() {
        assert_eq!(fill("{account}.{source}.{channel}", "a:b"), "acme.channel.message.a%3Ab");
        for (channel, word) in
            [("#", "%23"), ("a.b", "a%2Eb"), ("*", "%2A"), ("a/b", "a%2Fb"), ("a%2Fb", "a%252Fb")]
        {
            assert_eq!(fill("{channel}", channel), word);
        }
        assert_eq!(fill("fixed", "a"), "fixed");
    }

    #[test]
    fn long_routing_key_is_cut_and_stays_unique() {
        let long = "\u{1f600}".repeat(128);
        let (one, other) = (fill("{channel}", &format!("{long}a")), fill("{channel}", &format!("{long}b")));
        assert!(one.len() <= NAME_BYTES_MAX && one.contains('~'), "{one}");
        assert_ne!(one, other);
    }
}
