//! Where to connect, and how.

use std::time::Duration;

use fanfare_proto::frame::Format;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::target::Target;
use crate::{Credential, Error};

/// How a [`crate::Client`] connects. [`Options::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct Options {
    /// `ws://host:port` or `http://host:port`, under TLS `wss://` or `https://`; the path `/realtime` is added.
    pub url: String,
    /// `host:port` to connect to in place of that of the URL, whose host the certificate and the request still name.
    pub connect_to: Option<String>,
    /// Certificates (PEM) that are trusted to sign the node's, instead of those of the platform.
    pub authorities: Option<Vec<u8>>,
    /// As whom.
    pub credential: Credential,
    /// Who this client says it is, where the credential does not say so.
    pub client_id: Option<String>,
    /// Whether this connection gets its own messages.
    pub echo: bool,
    /// JSON by default.
    pub format: Format,
    /// Whether and when a lost connection is taken up again. None, the default: its end is the end of the client.
    pub reconnect: Option<Reconnect>,
    /// Bytes of requests without an answer; 8 MiB by default. When they are reached a further request waits.
    pub unanswered_bytes_max: usize,
    /// Events waiting for [`crate::Client::next`]. When it is full nothing more is read from the socket, answers
    /// neither, and the node ends the connection as a slow consumer once its own buffer is full too.
    pub events_max: usize,
    /// Bytes of such events, of which one may be larger; 8 MiB by default. What holds when it is full is the same.
    pub events_bytes_max: usize,
}

/// The delays between a lost connection and the attempts to come back. They double from the first to the greatest, and each
/// is cut by up to a half at random. A node that names a delay of its own has its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reconnect {
    /// 200 ms by default.
    pub delay_min: Duration,
    /// 10 s by default.
    pub delay_max: Duration,
}

impl Default for Reconnect {
    fn default() -> Self {
        Self { delay_min: Duration::from_millis(200), delay_max: Duration::from_secs(10) }
    }
}

impl Options {
    /// JSON, own messages included, no reconnecting.
    pub fn new(url: impl Into<String>, credential: Credential) -> Self {
        Self {
            url: url.into(),
            connect_to: None,
            authorities: None,
            credential,
            client_id: None,
            echo: true,
            format: Format::Json,
            reconnect: None,
            unanswered_bytes_max: 8 * 1024 * 1024,
            events_max: 1024,
            events_bytes_max: 8 * 1024 * 1024,
        }
    }

    /// These options, with a lost connection taken up again.
    pub fn reconnecting(self) -> Self {
        Self { reconnect: Some(Reconnect::default()), ..self }
    }

    /// The realtime socket of the node.
    pub(crate) fn target(&self, resume: Option<&str>) -> Result<Target, Error> {
        let mut target = Target::of(&self.url, self.connect_to.as_deref())?;
        target.path = self.path(prefix(&target.path), resume);
        Ok(target)
    }

    /// The exchange of the TokenRequests of one key.
    pub(crate) fn exchange_target(&self, key_name: &str) -> Result<Target, Error> {
        let mut target = Target::of(&self.url, self.connect_to.as_deref())?;
        let key_name = utf8_percent_encode(key_name, NON_ALPHANUMERIC);
        target.path = format!("{}/keys/{key_name}/requestToken", prefix(&target.path));
        Ok(target)
    }

    fn path(&self, prefix: &str, resume: Option<&str>) -> String {
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
        if let Some(key) = resume {
            path.push_str("&resume=");
            path.extend(utf8_percent_encode(key, NON_ALPHANUMERIC));
        }
        path
    }
}

/// The path under which a node is, without that of its socket and without a query.
fn prefix(path: &str) -> &str {
    let path = path.split_once('?').map_or(path, |(path, _)| path).trim_end_matches('/');
    path.strip_suffix("/realtime").unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_becomes_a_path_and_never_holds_the_credential() {
        let mut options = Options::new("http://[::1]:8080/", Credential::Key("secret.k1".into()));
        options.client_id = Some("a&b c".into());
        options.echo = false;
        let target = options.target(Some("k/1")).expect("a target");
        assert_eq!(target.address, "[::1]:8080");
        assert_eq!(target.host, "[::1]:8080");
        assert_eq!(target.path, "/realtime?format=json&echo=false&clientId=a%26b%20c&resume=k%2F1");
        assert!(!format!("{options:?}").contains("secret"));
    }

    #[test]
    fn the_path_is_added_once() {
        let options = Options::new("ws://localhost/realtime", Credential::None);
        let target = options.target(None).expect("a target");
        assert_eq!(
            (target.address.as_str(), target.path.as_str()),
            ("localhost:80", "/realtime?format=json")
        );
    }

    #[test]
    fn the_exchange_is_under_the_path_of_the_node() {
        for url in ["ws://localhost/a/realtime", "http://localhost/a/"] {
            let target = Options::new(url, Credential::None).exchange_target("k/1").expect("a target");
            assert_eq!(target.path, "/a/keys/k%2F1/requestToken", "{url}");
        }
    }

    #[test]
    #[cfg(feature = "tls")]
    fn an_address_under_tls_has_a_name_and_a_port_of_its_own() {
        for (url, name, address) in [
            ("wss://node.example", "node.example", "node.example:443"),
            ("https://[::1]:8443", "::1", "[::1]:8443"),
        ] {
            let target = Options::new(url, Credential::None).target(None).expect("a target");
            assert_eq!((target.tls.as_deref(), target.address.as_str()), (Some(name), address));
        }
        let plain = Options::new("ws://node.example", Credential::None).target(None).expect("a target");
        assert_eq!(plain.tls, None);
        let mut one = Options::new("wss://node.example", Credential::None);
        one.connect_to = Some("10.1.2.3:8443".into());
        let target = one.target(None).expect("a target");
        assert_eq!(
            (target.tls.as_deref(), &*target.address, &*target.host),
            (Some("node.example"), "10.1.2.3:8443", "node.example")
        );
    }

    #[test]
    fn other_schemes_are_refused_with_a_reason() {
        for url in ["ftp://localhost", "localhost:8080"] {
            assert!(
                matches!(Options::new(url, Credential::None).target(None), Err(Error::BadUrl(_))),
                "{url}"
            );
        }
    }
}
