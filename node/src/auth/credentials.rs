//! The credential of a request.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::refused::Reason;

/// The places of a request that may carry a credential.
pub struct Credentials<'a> {
    /// Values of all Authorization headers.
    pub authorization: Vec<&'a [u8]>,
    /// The raw query without the question mark; read for the socket only: `accessToken`, its alias `token`, `key`, and
    /// `clientId`.
    pub query: &'a str,
    pub socket: bool,
    /// Address of the client, for the log of refusals.
    pub address: Option<IpAddr>,
}

impl fmt::Debug for Credentials<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// A credential as it was sent, not yet checked.
#[derive(PartialEq, Eq)]
pub(super) enum PresentedCredential<'a> {
    /// `<secret>.<keyName>`.
    Key(Cow<'a, str>),
    Token(Cow<'a, str>),
}

impl<'a> Credentials<'a> {
    /// The single credential. None, a malformed one, and several that differ are refused.
    pub(super) fn presented(&self) -> Result<PresentedCredential<'a>, Reason> {
        let from_headers = self.authorization.iter().map(|value| of_header(value));
        let from_query = self.parameters().filter_map(|(name, value)| match name.as_ref() {
            "accessToken" | "token" => Some(Ok(PresentedCredential::Token(value))),
            "key" => Some(Ok(PresentedCredential::Key(value))),
            _ => None,
        });
        let mut all = from_headers.chain(from_query);
        let first = all.next().ok_or(Reason::Missing)??;
        for other in all {
            if other? != first {
                return Err(Reason::Conflicting);
            }
        }
        Ok(first)
    }

    /// The first `clientId` of the query.
    pub(super) fn chosen_client_id(&self) -> Option<Cow<'a, str>> {
        self.parameters().find(|(name, _)| name == "clientId").map(|(_, value)| value)
    }

    fn parameters(&self) -> form_urlencoded::Parse<'a> {
        form_urlencoded::parse(if self.socket { self.query.as_bytes() } else { b"" })
    }
}

/// Parses `Basic <base64 of the whole key>` or `Bearer <service JWT>`.
pub(super) fn of_header<'a>(value: &'a [u8]) -> Result<PresentedCredential<'a>, Reason> {
    let value = std::str::from_utf8(value).map_err(|_| Reason::Malformed)?.trim_ascii();
    let (scheme, rest) = value.split_once(' ').ok_or(Reason::Malformed)?;
    let rest = rest.trim_ascii_start();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Ok(PresentedCredential::Token(rest.into()));
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return Err(Reason::Malformed);
    }
    let key = STANDARD.decode(rest).map_err(|_| Reason::Malformed)?;
    let key = String::from_utf8(key).map_err(|_| Reason::Malformed)?;
    // `user:password` is not a key, whatever its parts are.
    if key.contains(':') { Err(Reason::Malformed) } else { Ok(PresentedCredential::Key(key.into())) }
}
