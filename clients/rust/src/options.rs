//! Where to connect, as whom, and how.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_proto::frame::Format;
use hyper::Uri;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::Error;

/// Sent in the `authorization` header, never in the address. `Debug` shows neither.
#[derive(Clone)]
pub enum Credential {
    /// `<secret>.<keyName>`, sent as Basic.
    Key(String),
    /// A service JWT, sent as Bearer.
    Token(String),
    /// For a node that runs with `auth = off`.
    None,
}

impl Credential {
    pub(crate) fn header(&self) -> Option<String> {
        match self {
            Self::Key(key) => Some(format!("Basic {}", STANDARD.encode(key))),
            Self::Token(token) => Some(format!("Bearer {token}")),
            Self::None => None,
        }
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key(_) => "Key(…)",
            Self::Token(_) => "Token(…)",
            Self::None => "None",
        })
    }
}

#[derive(Clone, Debug)]
pub struct Options {
    /// `ws://host:port` or `http://host:port`, under TLS `wss://` or `https://`; the path `/realtime` is added.
    pub url: String,
    /// Certificates (PEM) that are trusted to sign the node's, instead of those of the platform.
    pub authorities: Option<Vec<u8>>,
    pub credential: Credential,
    /// Who this client says it is, where the credential does not say so.
    pub client_id: Option<String>,
    /// Whether this connection gets its own messages.
    pub echo: bool,
    pub format: Format,
    /// Events waiting for [`crate::Client::next`]. When it is full nothing more is read from the socket, answers
    /// neither, and the node ends the connection as a slow consumer once its own buffer is full too.
    pub events_max: usize,
}

impl Options {
    pub fn new(url: impl Into<String>, credential: Credential) -> Self {
        Self {
            url: url.into(),
            authorities: None,
            credential,
            client_id: None,
            echo: true,
            format: Format::Json,
            events_max: 1024,
        }
    }

    pub(crate) fn target(&self) -> Result<Target, Error> {
        let uri: Uri = self.url.parse().map_err(|e| Error::BadUrl(format!("{e}")))?;
        let tls = match uri.scheme_str() {
            Some("ws" | "http") => false,
            Some("wss" | "https") if cfg!(feature = "tls") => true,
            Some("wss" | "https") => return Err(Error::BadUrl("built without TLS".into())),
            _ => return Err(Error::BadUrl("ws://, wss://, http:// or https:// expected".into())),
        };
        let host = uri.host().ok_or_else(|| Error::BadUrl("no host".into()))?;
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Ok(Target {
            tls: tls.then(|| host.trim_matches(['[', ']']).to_owned()),
            address: format!("{host}:{port}"),
            host: uri.authority().map_or_else(String::new, |authority| authority.as_str().into()),
            path: self.path(uri.path()),
        })
    }

    fn path(&self, prefix: &str) -> String {
        let prefix = prefix.trim_end_matches('/');
        let prefix = prefix.strip_suffix("/realtime").unwrap_or(prefix);
        let format = match self.format {
            Format::Json => "json",
            Format::MsgPack => "msgpack",
        };
        let mut path = format!("{prefix}/realtime?format={format}");
        if !self.echo {
            path.push_str("&echo=false");
        }
        if let Some(client_id) = &self.client_id {
            path.push_str("&clientId=");
            path.extend(utf8_percent_encode(client_id, NON_ALPHANUMERIC));
        }
        path
    }
}

pub(crate) struct Target {
    /// Under TLS: the name that the certificate must be for.
    pub(crate) tls: Option<String>,
    /// `host:port` to connect to.
    pub(crate) address: String,
    /// The `host` header.
    pub(crate) host: String,
    /// Path and query.
    pub(crate) path: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_becomes_a_path_and_never_holds_the_credential() {
        let mut options = Options::new("http://[::1]:8080/", Credential::Key("secret.k1".into()));
        options.client_id = Some("a&b c".into());
        options.echo = false;
        let target = options.target().expect("a target");
        assert_eq!(target.address, "[::1]:8080");
        assert_eq!(target.host, "[::1]:8080");
        assert_eq!(target.path, "/realtime?format=json&echo=false&clientId=a%26b%20c");
        assert!(!format!("{options:?}").contains("secret"));
    }

    #[test]
    fn the_path_is_added_once() {
        let options = Options::new("ws://localhost/realtime", Credential::None);
        let target = options.target().expect("a target");
        assert_eq!(
            (target.address.as_str(), target.path.as_str()),
            ("localhost:80", "/realtime?format=json")
        );
    }

    #[test]
    #[cfg(feature = "tls")]
    fn an_address_under_tls_has_a_name_and_a_port_of_its_own() {
        for (url, name, address) in [
            ("wss://node.example", "node.example", "node.example:443"),
            ("https://[::1]:8443", "::1", "[::1]:8443"),
        ] {
            let target = Options::new(url, Credential::None).target().expect("a target");
            assert_eq!((target.tls.as_deref(), target.address.as_str()), (Some(name), address));
        }
        let plain = Options::new("ws://node.example", Credential::None).target().expect("a target");
        assert_eq!(plain.tls, None);
    }

    #[test]
    fn other_schemes_are_refused_with_a_reason() {
        for url in ["ftp://localhost", "localhost:8080"] {
            assert!(matches!(Options::new(url, Credential::None).target(), Err(Error::BadUrl(_))), "{url}");
        }
    }
}
