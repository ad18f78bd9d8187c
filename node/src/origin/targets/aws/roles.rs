//! Keys for a target's requests: those of the directory, or those of a role that is assumed with them.

use std::collections::HashMap;
use std::sync::Arc;

use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;
use bytes::Bytes;
use form_urlencoded::Serializer;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::call::{self, AwsCallError, AwsCaller, AwsRequest};
use super::sign::SigningService;
use crate::accounts::{AwsAccess, AwsKeys, AwsRole, Secret};

/// Duration of a session, which every role allows.
const SESSION_SECONDS: &str = "3600";
/// Remaining time below which keys are replaced while they are still valid.
const SPARE_MS: u64 = 5 * 60 * 1000;
/// Pause after a replacement that failed.
const AGAIN_MS: u64 = 30_000;
/// Time in which attempts that waited for a failed one share its reason.
const FAILED_MS: u64 = 1_000;
/// Number of sessions beyond which those with expired keys are removed.
const SESSIONS_MAX: usize = 256;

/// Sessions of all roles. One attempt at a time requests a role.
#[derive(Default)]
pub(super) struct RoleSessions {
    sessions: Mutex<HashMap<[u8; 32], Arc<RoleSession>>>,
}

#[derive(Default)]
struct RoleSession {
    /// Lock that is held during a request to STS.
    flight: tokio::sync::Mutex<()>,
    state: Mutex<RoleSessionState>,
}

#[derive(Default)]
struct RoleSessionState {
    assumed: Option<AssumedKeys>,
    /// Time and reason of the last attempt, if it failed.
    failed: Option<(u64, String)>,
}

#[derive(Clone)]
struct AssumedKeys {
    keys: Arc<AwsKeys>,
    expires_ms: u64,
    /// Time from which new keys are requested.
    replace_ms: u64,
}

impl RoleSessions {
    /// Returns the keys for a request, and assumes the role if necessary.
    ///
    /// # Errors
    /// The role cannot be assumed now; the reason holds no secret.
    pub(super) async fn keys(
        &self,
        caller: &AwsCaller,
        access: &AwsAccess,
        deadline: Instant,
    ) -> Result<Arc<AwsKeys>, String> {
        let Some(role) = &access.credentials.role else {
            return Ok(Arc::new(access.credentials.keys.clone()));
        };
        let session = self.session(access, role, caller.clock.now_ms());
        let good = session.good(caller.clock.now_ms());
        let flight = match &good {
            Some(assumed) if caller.clock.now_ms() < assumed.replace_ms => {
                return Ok(Arc::clone(&assumed.keys));
            }
            // Another attempt is replacing these keys, which are still valid.
            Some(assumed) => match session.flight.try_lock() {
                Ok(flight) => flight,
                Err(_) => return Ok(Arc::clone(&assumed.keys)),
            },
            None => session.flight.lock().await,
        };
        let now_ms = caller.clock.now_ms();
        if let Some(settled) = session.settled(now_ms) {
            return settled;
        }
        let assumed = assume(caller, access, role, deadline).await;
        let settled = session.settle(assumed, caller.clock.now_ms());
        drop(flight);
        settled
    }

    /// Drops the keys of the role, which the service has refused.
    pub(super) fn forget(&self, access: &AwsAccess, keys: &Arc<AwsKeys>) {
        let Some(role) = &access.credentials.role else { return };
        let session = self.sessions.lock().get(&name(access, role)).map(Arc::clone);
        let Some(session) = session else { return };
        let mut state = session.state.lock();
        if state.assumed.as_ref().is_some_and(|assumed| Arc::ptr_eq(&assumed.keys, keys)) {
            state.assumed = None;
        }
    }

    fn session(&self, access: &AwsAccess, role: &AwsRole, now_ms: u64) -> Arc<RoleSession> {
        let mut sessions = self.sessions.lock();
        if sessions.len() >= SESSIONS_MAX {
            sessions.retain(|_, session| Arc::strong_count(session) > 1 || session.good(now_ms).is_some());
        }
        Arc::clone(sessions.entry(name(access, role)).or_default())
    }
}

impl RoleSession {
    fn good(&self, now_ms: u64) -> Option<AssumedKeys> {
        self.state.lock().assumed.clone().filter(|assumed| now_ms < assumed.expires_ms)
    }

    /// Returns the result of the attempt before, if it still applies.
    fn settled(&self, now_ms: u64) -> Option<Result<Arc<AwsKeys>, String>> {
        let state = self.state.lock();
        match (&state.assumed, &state.failed) {
            (Some(assumed), _) if now_ms < assumed.replace_ms => Some(Ok(Arc::clone(&assumed.keys))),
            (None, Some((at_ms, reason))) if now_ms < at_ms + FAILED_MS => Some(Err(reason.clone())),
            _ => None,
        }
    }

    fn settle(&self, assumed: Result<AssumedKeys, String>, now_ms: u64) -> Result<Arc<AwsKeys>, String> {
        let mut state = self.state.lock();
        let RoleSessionState { assumed: kept, failed } = &mut *state;
        match (assumed, kept) {
            (Ok(assumed), kept) => {
                *failed = None;
                Ok(Arc::clone(&kept.insert(assumed).keys))
            }
            (Err(reason), Some(kept)) if now_ms < kept.expires_ms => {
                tracing::warn!(target: crate::telemetry::RATE_LIMITED, reason, "role credentials renewal failed");
                kept.replace_ms = kept.expires_ms.min(now_ms + AGAIN_MS);
                Ok(Arc::clone(&kept.keys))
            }
            (Err(reason), kept) => {
                *kept = None;
                *failed = Some((now_ms, reason.clone()));
                Err(reason)
            }
        }
    }
}

/// Identifies a session by its credentials and role; the separator, a zero byte, is in none of the fields.
fn name(access: &AwsAccess, role: &AwsRole) -> [u8; 32] {
    let AwsKeys { id, secret, session_token } = &access.credentials.keys;
    let parts = [
        id.as_str(),
        secret.as_str(),
        session_token.as_ref().map_or("", Secret::as_str),
        &role.arn,
        role.external_id.as_deref().unwrap_or(""),
        &role.session_name,
        role.endpoint.url().as_str(),
        &access.region,
    ];
    Sha256::digest(parts.join("\0")).into()
}

/// Builds the form of one AssumeRole call.
fn form(role: &AwsRole) -> Bytes {
    let mut form = Serializer::new(String::new());
    form.append_pair("Action", "AssumeRole").append_pair("Version", "2011-06-15");
    form.append_pair("RoleArn", &role.arn).append_pair("RoleSessionName", &role.session_name);
    form.append_pair("DurationSeconds", SESSION_SECONDS);
    if let Some(external_id) = &role.external_id {
        form.append_pair("ExternalId", external_id);
    }
    form.finish().into()
}

async fn assume(
    caller: &AwsCaller,
    access: &AwsAccess,
    role: &AwsRole,
    deadline: Instant,
) -> Result<AssumedKeys, String> {
    let request = AwsRequest {
        service: SigningService::Sts,
        url: role.endpoint.url(),
        headers: call::FORM,
        body: form(role),
    };
    let keys = &access.credentials.keys;
    let answer = match caller.ask(&role.endpoint, &access.region, keys, request, deadline).await {
        Ok(answer) => answer,
        Err(AwsCallError::Late) => return Err("no answer in time".to_owned()),
        Err(AwsCallError::Other(reason)) => return Err(reason),
    };
    if !answer.is_good() {
        return Err(answer.reason());
    }
    let secret = |name| answer.element(name).and_then(|text| Secret::new(text).ok());
    let (id, secret, session_token) =
        (secret("AccessKeyId"), secret("SecretAccessKey"), secret("SessionToken"));
    let expires =
        answer.element("Expiration").and_then(|text| DateTime::from_str(text, Format::DateTime).ok());
    let expires_ms = expires.and_then(|expires| u64::try_from(expires.secs()).ok()).map(|secs| secs * 1000);
    let (Some(id), Some(secret), Some(expires_ms)) = (id, secret, expires_ms) else {
        return Err("the answer of STS has no keys".to_owned());
    };
    let keys = Arc::new(AwsKeys { id, secret, session_token });
    let now_ms = caller.clock.now_ms();
    // Keys with a short lifetime are replaced at half of it.
    let spare_ms = SPARE_MS.min(expires_ms.saturating_sub(now_ms) / 2);
    Ok(AssumedKeys { keys, expires_ms, replace_ms: expires_ms - spare_ms })
}
