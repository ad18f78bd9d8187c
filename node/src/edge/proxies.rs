//! Trusted load balancers and proxies, and the client addresses that they report.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr};

use mio::net::TcpStream;
use ppp::{HeaderResult, PartialResult as _, v1, v2};

use crate::model::Network;
use crate::telemetry::RATE_LIMITED;

/// Longest PROXY header. Addresses take 52 bytes in version 2, and 107 in version 1; load balancers add some hundred bytes.
const HEADER_BYTES_MAX: usize = 4096;
const V1_BYTES_MAX: usize = 107;

/// Proxies that the operator trusts, and their protocol.
#[derive(Debug, Default)]
pub struct Proxies {
    trusted: Vec<Network>,
    /// True if connections of these proxies begin with a PROXY header.
    speak_proxy: bool,
}

/// Client of a connection that comes over a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxiedClient {
    /// PROXY header not received yet.
    Awaited,
    From(IpAddr),
}

impl Proxies {
    pub fn new(trusted: &[Network], speak_proxy: bool) -> Self {
        Self { trusted: trusted.to_vec(), speak_proxy }
    }

    fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.trusted.iter().any(|network| network.contains(address))
    }

    /// State of a new connection from this peer: awaits a PROXY header if the peer is a trusted proxy.
    pub fn begin(&self, peer: SocketAddr) -> Option<Box<ProxiedClient>> {
        (self.speak_proxy && self.trusts(peer.ip())).then(|| Box::new(ProxiedClient::Awaited))
    }

    /// Client address of a request: the last entry of `X-Forwarded-For` that is no trusted proxy, if only trusted ones follow it. With the
    /// PROXY protocol the header is ignored, since such proxies pass on whatever the client wrote there.
    pub fn client<'a>(
        &self,
        peer: IpAddr,
        forwarded_for: impl DoubleEndedIterator<Item = &'a [u8]>,
    ) -> IpAddr {
        let mut client = peer.to_canonical();
        let entries = forwarded_for.rev().flat_map(|value| value.rsplit(|byte| *byte == b','));
        for entry in entries {
            if self.speak_proxy || !self.trusts(client) {
                break;
            }
            let Some(address) = std::str::from_utf8(entry).ok().and_then(|text| parse(text.trim())) else {
                break;
            };
            client = address.to_canonical();
        }
        client
    }
}

/// Parses an address, with or without a port.
fn parse(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|address| address.ip()))
}

/// Takes the PROXY header off a connection, and no byte after it. None: the proxy itself is the client, as for a health check.
///
/// # Errors
/// [`ErrorKind::WouldBlock`] until the whole header has arrived; [`ErrorKind::InvalidData`] if it is invalid.
pub(super) fn take_header(socket: &mut TcpStream, buffer: &mut [u8]) -> io::Result<Option<IpAddr>> {
    let count = socket.peek(buffer)?;
    if count == 0 {
        // The end of the stream, as when a health check only opens the port.
        return Ok(None);
    }
    let bytes = &buffer[..count];
    // The parser takes some incomplete headers of version 1 for broken ones.
    let is_begun = bytes.starts_with(b"PROXY") && !bytes.contains(&b'\n') && count < V1_BYTES_MAX;
    let header = HeaderResult::parse(bytes);
    if (is_begun || header.is_incomplete()) && count < HEADER_BYTES_MAX.min(buffer.len()) {
        return Err(ErrorKind::WouldBlock.into());
    }
    let (length, client) = match header {
        HeaderResult::V1(Ok(header)) => (header.header.len(), client_v1(&header)),
        HeaderResult::V2(Ok(header)) => (header.len(), client_v2(&header)),
        HeaderResult::V1(Err(_)) | HeaderResult::V2(Err(_)) => {
            metrics::counter!("fanfare_proxy_headers_refused_total").increment(1);
            let peer = socket.peer_addr().ok();
            tracing::warn!(target: RATE_LIMITED, ?peer, "PROXY protocol header missing from a trusted proxy: connection closed");
            return Err(ErrorKind::InvalidData.into());
        }
    };
    socket.read_exact(&mut buffer[..length])?;
    Ok(client.map(|client| client.to_canonical()))
}

fn client_v1(header: &v1::Header<'_>) -> Option<IpAddr> {
    match &header.addresses {
        v1::Addresses::Unknown => None,
        v1::Addresses::Tcp4(of) => Some(of.source_address.into()),
        v1::Addresses::Tcp6(of) => Some(of.source_address.into()),
    }
}

fn client_v2(header: &v2::Header<'_>) -> Option<IpAddr> {
    if header.command == v2::Command::Local {
        return None;
    }
    match &header.addresses {
        v2::Addresses::IPv4(of) => Some(of.source_address.into()),
        v2::Addresses::IPv6(of) => Some(of.source_address.into()),
        v2::Addresses::Unspecified | v2::Addresses::Unix(_) => None,
    }
}

#[cfg(test)]
mod tests;
