//! The parts of an address that a connection to it needs.

use hyper::Uri;
use tokio::net::TcpStream;

use crate::Error;

/// An address, taken apart.
pub(crate) struct Target {
    /// Name that the certificate must be for; `None` without TLS.
    pub(crate) tls: Option<String>,
    /// `host:port` to connect to.
    pub(crate) address: String,
    /// Value of the `host` header.
    pub(crate) host: String,
    /// Path and query.
    pub(crate) path: String,
}

impl Target {
    /// Takes a URL apart. `connect_to` is the `host:port` to connect to in place of the URL's.
    pub(crate) fn of(url: &str, connect_to: Option<&str>) -> Result<Self, Error> {
        let uri: Uri = url.parse().map_err(|e| Error::BadUrl(format!("{e}")))?;
        let tls = match uri.scheme_str() {
            Some("ws" | "http") => false,
            Some("wss" | "https") if cfg!(feature = "tls") => true,
            Some("wss" | "https") => return Err(Error::BadUrl("built without TLS".into())),
            _ => return Err(Error::BadUrl("ws://, wss://, http:// or https:// expected".into())),
        };
        let host = uri.host().ok_or_else(|| Error::BadUrl("no host".into()))?;
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Ok(Self {
            tls: tls.then(|| host.trim_matches(['[', ']']).to_owned()),
            address: connect_to.map_or_else(|| format!("{host}:{port}"), str::to_owned),
            host: host_header(&uri).into(),
            path: uri.path_and_query().map_or("/", |path| path.as_str()).into(),
        })
    }

    pub(crate) async fn connect(&self) -> Result<TcpStream, Error> {
        let stream = TcpStream::connect(&self.address)
            .await
            .map_err(|source| Error::Unreachable { address: self.address.clone(), source })?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

/// Gives host and port as they stand in the address, without user and password.
fn host_header(uri: &Uri) -> &str {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    authority.rsplit_once('@').map_or(authority, |(_, host)| host)
}
