//! Presence on a socket: permissions of members, and answers in the order of the requests.

use fanfare_proto::frame::{self, code};

use super::{Context, Output, PublishResult, Session};
use crate::model::{ChannelName, ClientId, MemberId, NameError, Operation, PresenceAction, SessionOwner};
use crate::publish::{PresenceError, PresenceRequest};
use crate::telemetry::Limit;

impl From<Result<(), PresenceError>> for PublishResult {
    fn from(result: Result<(), PresenceError>) -> Self {
        let code = match &result {
            Ok(()) => return Self::Acked(Vec::new()),
            Err(PresenceError::Unavailable) => return Self::Unavailable,
            Err(PresenceError::DataTooLarge { .. }) => code::TOO_LARGE,
            Err(PresenceError::Refused(_)) => code::LIMIT,
            Err(PresenceError::Busy) => code::UNAVAILABLE,
        };
        refused(code, &result.err().map_or_else(String::new, |error| error.to_string()))
    }
}

fn refused(code: u32, error: &str) -> PublishResult {
    PublishResult::Refused { code, error: error.to_owned(), reason: None }
}

impl Session {
    /// Begins a presence request whose turn has come; [`Session::advance`] sends a refusal as its answer.
    pub(super) fn present(
        &mut self,
        cx: Context<'_>,
        channel: ChannelName,
        id: Option<String>,
        presence: frame::PresenceRequest,
        refusal: Option<PublishResult>,
        out: &mut Vec<Output>,
    ) {
        let checked = match refusal {
            Some(refusal) => Err(refusal),
            None => self.check_presence(cx, &channel, &presence),
        };
        let (ticket, queue) = self.begin(&channel, id);
        let (client_id, action) = match checked {
            Ok(checked) => checked,
            Err(refusal) => {
                queue.answer(ticket, refusal);
                return;
            }
        };
        let request = Box::new(PresenceRequest {
            key: self.principal.channel(channel),
            account: self.principal.account.clone(),
            member: MemberId { connection_id: self.ownership.connection_id, client_id },
            epoch: self.ownership.epoch,
            action,
            data: presence.data,
        });
        out.push(Output::Present { ticket, request });
    }

    /// Owner under which this connection's members are present.
    pub fn owner(&self) -> SessionOwner {
        self.ownership.owner()
    }

    fn check_presence(
        &self,
        cx: Context<'_>,
        channel: &ChannelName,
        presence: &frame::PresenceRequest,
    ) -> Result<(ClientId, PresenceAction), PublishResult> {
        if !self.principal.allows(channel.as_str(), Operation::Presence) {
            let error = "the capability does not cover presence on this channel";
            return Err(refused(code::CAPABILITY, error));
        }
        let Some(action) = PresenceAction::parse(&presence.action) else {
            return Err(refused(code::BAD_REQUEST, "action must be enter, update or leave"));
        };
        let named = match &presence.client_id {
            None => None,
            Some(name) => {
                let error = |error: NameError| {
                    Limit::ClientIdBytes.hit_if(error.is_too_long());
                    refused(code::BAD_REQUEST, &format!("clientId {error}"))
                };
                Some(ClientId::new(name, cx.limits).map_err(error)?)
            }
        };
        let client_id = match (&self.principal.client_id, named) {
            (Some(forced), Some(named)) if named != *forced => {
                return Err(refused(code::CAPABILITY, "the credential is of another clientId"));
            }
            (_, Some(named)) => named,
            (_, None) => self.client_id.clone().ok_or_else(|| {
                refused(code::BAD_REQUEST, "neither the connection nor the request has a clientId")
            })?,
        };
        Ok((client_id, action))
    }
}

/// Members of a connection that leave at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveScope {
    All,
    /// Members on channels whose presence the present capability does not grant.
    NotGranted,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presence_outcomes_map_to_result_codes() {
        let code = |error| match PublishResult::from(Err(error)) {
            PublishResult::Refused { code, .. } => code,
            other => unreachable!("these errors are refusals, not {other:?}"),
        };
        assert_eq!(PublishResult::from(Ok(())), PublishResult::Acked(Vec::new()));
        assert_eq!(PublishResult::from(Err(PresenceError::Unavailable)), PublishResult::Unavailable);
        assert_eq!(code(PresenceError::DataTooLarge { bytes: 2, bytes_max: 1 }), 40009);
        let full = crate::hub::PresenceRefusal::Channel { members_max: 1 };
        assert_eq!(code(PresenceError::Refused(full)), 42900);
        assert_eq!(code(PresenceError::Busy), 50003);
    }
}
