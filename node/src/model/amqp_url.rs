//! The addresses of an AMQP broker.

use std::fmt;
use std::hash::{Hash, Hasher};

use url::Url;

const BYTES_MAX: usize = 2048;

/// `amqp://` or `amqps://` with a host; user, password and query are secrets. It prints as scheme, host and port.
#[derive(Clone)]
pub struct AmqpUrl {
    url: Url,
    vhost: Box<str>,
}

impl AmqpUrl {
    /// Parses an address. The error shows nothing of the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > BYTES_MAX {
            return Err(format!("must not be longer than {BYTES_MAX} bytes"));
        }
        let url = Url::parse(text)
            .map_err(|error| format!("must be a URL such as amqp://user:password@host:5672/%2f: {error}"))?;
        if !matches!(url.scheme(), "amqp" | "amqps") {
            return Err("must begin with amqp:// or amqps://".to_owned());
        }
        if url.host_str().is_none_or(str::is_empty) {
            return Err("must name a host".to_owned());
        }
        if url.port() == Some(0) {
            return Err("must not have port 0".to_owned());
        }
        if url.fragment().is_some() {
            return Err("must not have a fragment (#…)".to_owned());
        }
        // No path and the path `/` are the vhost that brokers have from the start.
        let path = url.path().strip_prefix('/').unwrap_or_default();
        let vhost = match fanfare_proto::path::decode(path) {
            Ok(vhost) if vhost.is_empty() => "/".into(),
            Ok(vhost) if !path.contains('/') => vhost.into(),
            _ => return Err("must have the name of a vhost as its path, percent-encoded".to_owned()),
        };
        Ok(Self { url, vhost })
    }

    /// The whole text, with its secrets and with the vhost spelled out.
    pub fn expose(&self) -> String {
        let mut url = self.url.clone();
        url.set_path(&fanfare_proto::path::encode_channel(&self.vhost));
        url.into()
    }

    /// The virtual host, decoded.
    pub fn vhost(&self) -> &str {
        &self.vhost
    }
}

impl PartialEq for AmqpUrl {
    fn eq(&self, other: &Self) -> bool {
        self.url == other.url && self.vhost == other.vhost
    }
}

impl Eq for AmqpUrl {}

impl Hash for AmqpUrl {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.url.hash(state);
    }
}

impl fmt::Display for AmqpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_place(&self.url, f)
    }
}

impl fmt::Debug for AmqpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The management API of a broker: `http://` or `https://` with a host; user and password are secrets. It prints as scheme, host
/// and port.
#[derive(Clone, PartialEq, Eq)]
pub struct ManagementUrl {
    url: Url,
}

impl ManagementUrl {
    /// Parses an address. The error shows nothing of the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > BYTES_MAX {
            return Err(format!("must not be longer than {BYTES_MAX} bytes"));
        }
        let url = Url::parse(text)
            .map_err(|error| format!("must be a URL such as http://user:password@host:15672: {error}"))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err("must begin with http:// or https://".to_owned());
        }
        if url.host_str().is_none_or(str::is_empty) || url.port() == Some(0) {
            return Err("must name a host and a port".to_owned());
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err("must have neither a query nor a fragment".to_owned());
        }
        Ok(Self { url })
    }

    /// The whole address, with its secrets.
    pub fn expose(&self) -> &Url {
        &self.url
    }
}

impl fmt::Display for ManagementUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_place(&self.url, f)
    }
}

impl fmt::Debug for ManagementUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_place(&self.url, f)
    }
}

fn write_place(url: &Url, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "{}://{}", url.scheme(), url.host_str().unwrap_or_default())?;
    url.port().map_or(Ok(()), |port| write!(f, ":{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vhost_is_decoded_and_secrets_are_not_printed() {
        for (text, vhost, exposed) in [
            ("amqp://u:hush@broker:5673/%2f", "/", "amqp://u:hush@broker:5673/%2F"),
            ("amqp://u:hush@broker:5673", "/", "amqp://u:hush@broker:5673/%2F"),
            ("amqp://u:hush@broker:5673/", "/", "amqp://u:hush@broker:5673/%2F"),
            (
                "amqp://u:hush@broker:5673/a%2Fb?heartbeat=5",
                "a/b",
                "amqp://u:hush@broker:5673/a%2Fb?heartbeat=5",
            ),
        ] {
            let url = AmqpUrl::parse(text).expect(text);
            assert_eq!((url.vhost(), &*url.expose()), (vhost, exposed), "{text}");
            assert_eq!(format!("{url} {url:?}"), "amqp://broker:5673 amqp://broker:5673");
        }
    }

    #[test]
    fn malformed_address_is_refused_without_its_text() {
        for text in [
            "http://hush@broker",
            "amqp://",
            "hush",
            "amqp://hush@broker:0",
            "amqp://hush@broker/a/b",
            "amqp://hush@broker/%zz",
            "amqp://hush@broker/#hush",
        ] {
            let refused = AmqpUrl::parse(text).expect_err(text);
            assert!(!refused.contains("hush"), "{refused}");
        }
        for text in ["amqp://hush@broker", "http://", "http://hush@broker:0", "http://broker?hush", "hush"] {
            let refused = ManagementUrl::parse(text).expect_err(text);
            assert!(!refused.contains("hush"), "{refused}");
        }
        let url = ManagementUrl::parse("https://u:hush@broker:15671/base").expect("an address");
        assert_eq!(format!("{url} {url:?}"), "https://broker:15671 https://broker:15671");
    }
}
