//! The connection's credential over time: its part of `connected`, refresh by op 15, and expiry.

use std::sync::Arc;

use fanfare_proto::frame::{Connected, ServerFrame, close, code};

use super::{Context, Output, Session};
use crate::auth::{Principal, Reason};

/// A client is asked for a new token this long before the old one expires.
const REFRESH_AHEAD_MS: u64 = 30_000;
/// After op 4 the client closes. Otherwise the server closes after this time.
const CLOSE_AFTER_MS: u64 = 1_000;

impl Session {
    /// Asks for a new token in time, and ends the connection when the token has expired.
    pub fn tick(&mut self, cx: Context<'_>, out: &mut Vec<Output>) {
        let Some(expires) = self.principal.expires_ms else { return };
        if cx.now_ms >= expires {
            let error = "the token has expired";
            self.disconnect(error, code::TOKEN_EXPIRED, close::CREDENTIAL, 0, CLOSE_AFTER_MS, out);
        } else if !self.refresh_requested && cx.now_ms + REFRESH_AHEAD_MS >= expires {
            self.refresh_requested = true;
            self.send(&ServerFrame::AuthRequired { code: code::TOKEN_EXPIRED, expires }, out);
        }
    }

    /// Time at which [`Session::tick`] has work, in epoch milliseconds.
    pub fn due_ms(&self) -> Option<u64> {
        let expires = self.principal.expires_ms?;
        Some(if self.refresh_requested { expires } else { expires.saturating_sub(REFRESH_AHEAD_MS) })
    }

    pub(super) fn send_connected(&self, cx: Context<'_>, resumed: bool, out: &mut Vec<Output>) {
        let connected = Connected {
            connection_id: &self.ownership.connection_id.to_string(),
            connection_key: &cx.keys.seal(&self.ownership, &self.principal, self.client_id.as_ref()),
            client_id: self.client_id.as_ref().map(crate::model::ClientId::as_str),
            node_id: cx.node_id,
            resumed,
            heartbeat_ms: cx.limits.heartbeat_ms,
            resume_window_ms: cx.limits.resume_window_ms,
            max_message_bytes: cx.limits.message_bytes,
            expires: self.principal.expires_ms,
            server_time: cx.now_ms,
        };
        self.send(&ServerFrame::Connected(connected), out);
    }

    /// Replaces the credential by its present form in the directory, and removes what it no longer grants.
    pub fn renew(&mut self, principal: Principal, out: &mut Vec<Output>) {
        self.principal = Arc::new(principal);
        self.narrow(out);
    }

    /// Op 15: replaces the credential by the new token if account and clientId stay the same; otherwise the old one stays.
    pub(super) fn refresh(&mut self, cx: Context<'_>, id: Option<&str>, token: &str, out: &mut Vec<Output>) {
        let principal = match cx.auth.authenticate_token(token) {
            Ok(principal) => principal,
            Err(refused) => {
                out.push(Output::NoteRefused(refused));
                return self.nack(id, code::TOKEN, "the token is not valid", None, out);
            }
        };
        if principal.account.id != self.principal.account.id {
            out.push(Output::NoteRefused(principal.refused(Reason::OtherAccount)));
            return self.nack(id, code::TOKEN, "the token is of another account", None, out);
        }
        let keeps_client_id = match &principal.client_id {
            Some(client_id) => self.client_id.as_ref() == Some(client_id),
            None => self.principal.client_id.is_none(),
        };
        if !keeps_client_id {
            out.push(Output::NoteRefused(principal.refused(Reason::OtherClientId)));
            return self.nack(id, code::TOKEN, "the token is of another clientId", None, out);
        }
        self.principal = Arc::new(principal);
        self.refresh_requested = false;
        if let Some(id) = id {
            self.send(&ServerFrame::Ack { id, serials: None }, out);
        }
        self.send_connected(cx, true, out);
        self.narrow(out);
        self.tick(cx, out);
    }
}
