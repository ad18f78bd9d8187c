//! Options of a client.

use std::time::Duration;

use fanfare_proto::frame::Format;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::target::Target;
use crate::{Credential, Error};

/// Options of a [`crate::Client`]. [`Options::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct Options {
    /// `ws://host:port` or `http://host:port`, under TLS `wss://` or `https://`; the path `/realtime` is added.
    pub url: String,
    /// `host:port` to connect to in place of the URL's. The certificate and the request still name the URL's
    /// host.
    pub connect_to: Option<String>,
    /// PEM certificates of the authorities that are trusted to sign the node's certificate, in place of the
    /// platform's.
    pub authorities: Option<Vec<u8>>,
    /// Credential of the connection.
    pub credential: Credential,
    /// Client id of the connection, if the credential leaves it open.
    pub client_id: Option<String>,
    /// Whether the connection gets its own messages.
    pub echo: bool,
    /// Encoding of the frames; JSON by default.
    pub format: Format,
    /// Delays of the attempts to connect again; `None`, the default: the end of the connection is the end of
    /// the client.
    pub reconnect: Option<Reconnect>,
    /// Greatest size of the requests without an answer, in bytes; 8 MiB by default. A further request waits.
    pub unanswered_bytes_max: usize,
    /// Greatest number of events that wait for [`crate::Client::next`]; 1024 by default. Beyond it the client
    /// reads nothing from the socket, answers neither. Once the node's own buffer is full, it ends the
    /// connection as a slow consumer.
    pub events_max: usize,
    /// Greatest size of the waiting events, in bytes, of which one may be larger; 8 MiB by default. The same
    /// follows beyond it.
    pub events_bytes_max: usize,
}

/// Delays of the attempts to connect again. They double from the least to the greatest, and each is cut by up
/// to a half at random. A delay that the node asks for takes their place, unless it asks again and again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reconnect {
    /// Least delay; 200 ms by default.
    pub delay_min: Duration,
    /// Greatest delay; 10 s by default.
    pub delay_max: Duration,
}

impl Default for Reconnect {
    fn default() -> Self {
        Self { delay_min: Duration::from_millis(200), delay_max: Duration::from_secs(10) }
    }
}

impl Options {
    /// Makes options with JSON, own messages included, and without reconnecting.
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

    /// Gives these options with the default delays of [`Reconnect`].
    pub fn reconnecting(self) -> Self {
        Self { reconnect: Some(Reconnect::default()), ..self }
    }

    /// Gives the address of the node's socket.
    pub(crate) fn target(&self, resume: Option<&str>) -> Result<Target, Error> {
        let mut target = Target::of(&self.url, self.connect_to.as_deref())?;
        target.path = self.path(prefix(&target.path), resume);
        Ok(target)
    }

    /// Gives the address for the exchange of TokenRequests of one key.
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

/// Gives the path of the node, without the path of its socket and without a query.
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
