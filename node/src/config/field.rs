//! Parsing and display of each type of a setting.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use super::quantity::{parse_count, parse_duration, show_duration};
use super::{SchemaMode, StoreKind};
use crate::model::{AllowRule, AmqpUrl, ManagementUrl, Network};
use crate::telemetry::LogFormat;
use crate::telemetry::traces::{CollectorUrl, SampleRatio};

/// The shape of a setting in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Text,
    /// `true` or `false`; a flag needs no value.
    Boolean,
    /// A whole number, or a text with a unit.
    Number,
    /// A number that may have a fraction.
    Fraction,
    /// A list of texts, or one; separated by commas in a variable, repeated as a flag.
    List,
}

/// A value as written in a variable or after a flag.
pub(super) trait Field: Sized {
    const FORM: Form = Form::Text;

    fn read(text: &str) -> Result<Self, String>;
    /// The text of a value; none if there is no default.
    fn show(&self) -> Option<String>;
}

impl Field for PathBuf {
    fn read(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("expected a path, got nothing".to_owned()) } else { Ok(Self::from(text)) }
    }

    fn show(&self) -> Option<String> {
        self.to_str().map(str::to_owned)
    }
}

impl Field for String {
    fn read(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn show(&self) -> Option<String> {
        Some(self.clone())
    }
}

impl<F: Field> Field for Option<F> {
    const FORM: Form = F::FORM;

    fn read(text: &str) -> Result<Self, String> {
        F::read(text).map(Some)
    }

    fn show(&self) -> Option<String> {
        self.as_ref().and_then(F::show)
    }
}

impl Field for SocketAddr {
    fn read(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse() {
            return Ok(address);
        }
        let expected = || format!("expected a host and a port such as 127.0.0.1:8080, got `{text}`");
        let (host, port) = text.rsplit_once(':').ok_or_else(expected)?;
        if host.contains(':') || read_host(host).is_err() || port.parse::<u16>().is_err() {
            return Err(expected());
        }
        let unknown = |error| format!("the host of `{text}` is not known: {error}");
        let addresses = text.to_socket_addrs().map_err(unknown)?.collect::<Vec<_>>();
        let v4 = addresses.iter().find(|address| address.is_ipv4());
        v4.or(addresses.first()).copied().ok_or_else(expected)
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

/// Hosts and ports, separated by commas. Names are resolved later, and repeatedly.
impl Field for Vec<String> {
    const FORM: Form = Form::List;

    fn read(text: &str) -> Result<Self, String> {
        text.split(',').map(str::trim).map(read_endpoint).collect()
    }

    fn show(&self) -> Option<String> {
        (!self.is_empty()).then(|| self.join(","))
    }
}

/// Networks and addresses, separated by commas.
macro_rules! networks {
    ($of:ty) => {
        impl Field for Vec<$of> {
            const FORM: Form = Form::List;

            fn read(text: &str) -> Result<Self, String> {
                text.split(',').map(str::trim).map(str::parse).collect()
            }

            fn show(&self) -> Option<String> {
                let texts: Vec<_> = self.iter().map(<$of>::to_string).collect();
                (!texts.is_empty()).then(|| texts.join(","))
            }
        }
    };
}

networks!(AllowRule);
networks!(Network);

/// Shown without its secrets.
impl Field for AmqpUrl {
    fn read(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

/// Shown without its secrets.
impl Field for ManagementUrl {
    fn read(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Field for CollectorUrl {
    fn read(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Field for SampleRatio {
    const FORM: Form = Form::Fraction;

    fn read(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Field for Duration {
    fn read(text: &str) -> Result<Self, String> {
        parse_duration(text)
    }

    fn show(&self) -> Option<String> {
        Some(show_duration(*self))
    }
}

impl Field for usize {
    const FORM: Form = Form::Number;

    fn read(text: &str) -> Result<Self, String> {
        Self::try_from(parse_count(text)?).map_err(|_| format!("{text} is too large"))
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Field for bool {
    const FORM: Form = Form::Boolean;

    fn read(text: &str) -> Result<Self, String> {
        match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(format!("expected true or false, got `{text}`")),
        }
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Field for StoreKind {
    fn read(text: &str) -> Result<Self, String> {
        one_of(text, &[("embedded", Self::Embedded), ("none", Self::None), ("scylla", Self::Scylla)])
    }

    fn show(&self) -> Option<String> {
        let text = match self {
            Self::Embedded => "embedded",
            Self::None => "none",
            Self::Scylla => "scylla",
        };
        Some(text.to_owned())
    }
}

impl Field for SchemaMode {
    fn read(text: &str) -> Result<Self, String> {
        one_of(text, &[("auto", Self::Auto), ("check", Self::Check)])
    }

    fn show(&self) -> Option<String> {
        Some(if *self == Self::Auto { "auto" } else { "check" }.to_owned())
    }
}

impl Field for LogFormat {
    fn read(text: &str) -> Result<Self, String> {
        one_of(text, &[("auto", Self::Auto), ("text", Self::Text), ("json", Self::Json)])
    }

    fn show(&self) -> Option<String> {
        let text = match self {
            Self::Auto => "auto",
            Self::Text => "text",
            Self::Json => "json",
        };
        Some(text.to_owned())
    }
}

/// `on` or `off`.
pub(super) fn read_switch(text: &str) -> Result<bool, String> {
    one_of(text, &[("on", true), ("off", false)])
}

/// Bound of the threads that share one listener.
const THREADS_MAX: usize = 64;

pub(super) fn read_threads(text: &str) -> Result<usize, String> {
    let threads = usize::read(text)?;
    if threads <= THREADS_MAX {
        Ok(threads)
    } else {
        Err(format!("must be between 0 and {THREADS_MAX}, got `{text}`"))
    }
}

/// A name that may stand in a header: `[A-Za-z0-9._-]{1,64}`.
pub(super) fn read_node_id(text: &str) -> Result<String, String> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if (1..=64).contains(&text.len()) && text.bytes().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err(format!("expected 1 to 64 letters, digits, `.`, `_` or `-`, got `{text}`"))
    }
}

fn read_endpoint(text: &str) -> Result<String, String> {
    let split = text.rsplit_once(':');
    let is_good = |(host, port): (&str, &str)| {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        read_host(bare).is_ok()
            && (bare != host || !host.contains(':'))
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    };
    if split.is_some_and(is_good) {
        Ok(text.to_owned())
    } else {
        Err(format!("expected a host and a port such as 10.0.0.1:7946 or nodes.example:7946, got `{text}`"))
    }
}

/// Parses an audience: any text, compared literally with a token's `aud`.
pub(super) fn read_audience(text: &str) -> Result<String, String> {
    if text.is_empty() || text.trim() != text || text.chars().any(char::is_control) {
        return Err(format!(
            "expected a name such as https://chat.example, without outer space and control characters, got `{}`",
            text.escape_debug()
        ));
    }
    Ok(text.to_owned())
}

/// Parses a host that can be advertised to others.
pub(super) fn read_reachable_host(text: &str) -> Result<String, String> {
    match text.parse::<std::net::IpAddr>() {
        Ok(address) if address.to_canonical().is_unspecified() => Err(format!(
            "expected a host that others reach this node under, got `{text}`, which stands for all addresses"
        )),
        _ => read_host(text),
    }
}

/// A name of the database.
pub(super) fn read_name(text: &str) -> Result<String, String> {
    if text.is_empty() || text.trim() != text || text.chars().any(char::is_control) {
        return Err(format!(
            "expected a name without outer space and control characters, got `{}`",
            text.escape_debug()
        ));
    }
    Ok(text.to_owned())
}

/// Bound of the stop time, above which a value is a mistake.
const DRAIN_MAX: Duration = Duration::from_secs(24 * 3600);

pub(super) fn read_drain_timeout(text: &str) -> Result<Duration, String> {
    let timeout = Duration::read(text)?;
    if timeout <= DRAIN_MAX { Ok(timeout) } else { Err(format!("must be between 0s and 24h, got `{text}`")) }
}

/// A name or an address, without a port.
fn read_host(text: &str) -> Result<String, String> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    let is_name = (1..=253).contains(&text.len()) && text.bytes().all(allowed);
    if is_name || text.parse::<std::net::IpAddr>().is_ok() {
        Ok(text.to_owned())
    } else {
        Err(format!("expected a name or an address without a port, such as 10.0.0.1, got `{text}`"))
    }
}

/// A name that needs no quotes in CQL: `[a-z][a-z0-9_]{0,47}`.
pub(super) fn read_keyspace(text: &str) -> Result<String, String> {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    if (1..=48).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.bytes().all(allowed)
    {
        Ok(text.to_owned())
    } else {
        Err(format!("expected 1 to 48 lower-case letters, digits or `_`, a letter first, got `{text}`"))
    }
}

/// Bound of the copies that a quorum can read or write in time.
const REPLICATION_MAX: usize = 9;

pub(super) fn read_replication(text: &str) -> Result<usize, String> {
    let copies = usize::read(text)?;
    if (1..=REPLICATION_MAX).contains(&copies) {
        Ok(copies)
    } else {
        Err(format!("must be between 1 and {REPLICATION_MAX}, got `{text}`"))
    }
}

fn one_of<T: Copy>(text: &str, choices: &[(&str, T)]) -> Result<T, String> {
    choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = choices.iter().map(|(name, _)| *name).collect();
        format!("expected {}, got `{text}`", names.join(" or "))
    })
}
