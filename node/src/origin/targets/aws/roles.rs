//! The keys with which a target is asked: those of the directory, or those of a role that is assumed with them.

use std::collections::HashMap;
use std::sync::Arc;

use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;
use bytes::Bytes;
use form_urlencoded::Serializer;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::call::{self, Caller, Failed, Request};
use super::sign::Service;
use crate::accounts::{AwsAccess, AwsKeys, AwsRole, Secret};

/// Every role allows an hour.
const SESSION_SECONDS: &str = "3600";
/// Keys with less time left are replaced while they still hold.
const SPARE_MS: u64 = 5 * 60 * 1000;
/// After a replacement that failed.
const AGAIN_MS: u64 = 30_000;
/// Attempts that waited for a failed one share its reason for so long.
const FAILED_MS: u64 = 1_000;
/// With more roles than this, those whose keys have expired are left out.
const KEPT_MAX: usize = 256;

/// The sessions of all roles. A role is asked for by one attempt at a time.
#[derive(Default)]
pub(super) struct Roles {
    sessions: Mutex<HashMap<[u8; 32], Arc<Session>>>,
}

#[derive(Default)]
struct Session {
    /// Held while STS is asked.
    flight: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    assumed: Option<Assumed>,
    /// When the last attempt failed, and why.
    failed: Option<(u64, String)>,
}

#[derive(Clone)]
struct Assumed {
    keys: Arc<AwsKeys>,
    expires_ms: u64,
    /// Further keys are asked for from then on.
    replace_ms: u64,
}

impl Roles {
    /// # Errors
    /// The role cannot be assumed now; the reason holds no secret.
    pub(super) async fn keys(
        &self,
        caller: &Caller,
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
            // Another attempt replaces these, which still hold.
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

    /// The service has refused the keys of the role, so that they are not used again.
    pub(super) fn forget(&self, access: &AwsAccess, keys: &Arc<AwsKeys>) {
        let Some(role) = &access.credentials.role else { return };
        let session = self.sessions.lock().get(&name(access, role)).map(Arc::clone);
        let Some(session) = session else { return };
        let mut state = session.state.lock();
        if state.assumed.as_ref().is_some_and(|assumed| Arc::ptr_eq(&assumed.keys, keys)) {
            state.assumed = None;
        }
    }

    fn session(&self, access: &AwsAccess, role: &AwsRole, now_ms: u64) -> Arc<Session> {
        let mut sessions = self.sessions.lock();
        if sessions.len() >= KEPT_MAX {
            sessions.retain(|_, session| Arc::strong_count(session) > 1 || session.good(now_ms).is_some());
        }
        Arc::clone(sessions.entry(name(access, role)).or_default())
    }
}

impl Session {
    fn good(&self, now_ms: u64) -> Option<Assumed> {
        self.state.lock().assumed.clone().filter(|assumed| now_ms < assumed.expires_ms)
    }

    /// The result of the attempt before this one, where that still counts.
    fn settled(&self, now_ms: u64) -> Option<Result<Arc<AwsKeys>, String>> {
        let state = self.state.lock();
        match (&state.assumed, &state.failed) {
            (Some(assumed), _) if now_ms < assumed.replace_ms => Some(Ok(Arc::clone(&assumed.keys))),
            (None, Some((at_ms, reason))) if now_ms < at_ms + FAILED_MS => Some(Err(reason.clone())),
            _ => None,
        }
    }

    fn settle(&self, assumed: Result<Assumed, String>, now_ms: u64) -> Result<Arc<AwsKeys>, String> {
        let mut state = self.state.lock();
        let State { assumed: kept, failed } = &mut *state;
        match (assumed, kept) {
            (Ok(assumed), kept) => {
                *failed = None;
                Ok(Arc::clone(&kept.insert(assumed).keys))
            }
            (Err(reason), Some(kept)) if now_ms < kept.expires_ms => {
                tracing::warn!(target: crate::telemetry::OFTEN, reason, "keys of a role could not be replaced");
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

/// Other credentials have another name; no field of them holds a zero byte.
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

/// The form of one call of AssumeRole.
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
    caller: &Caller,
    access: &AwsAccess,
    role: &AwsRole,
    deadline: Instant,
) -> Result<Assumed, String> {
    let request =
        Request { service: Service::Sts, url: role.endpoint.url(), headers: call::FORM, body: form(role) };
    let keys = &access.credentials.keys;
    let answer = match caller.ask(&role.endpoint, &access.region, keys, request, deadline).await {
        Ok(answer) => answer,
        Err(Failed::Late) => return Err("no answer in time".to_owned()),
        Err(Failed::Other(reason)) => return Err(reason),
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
    // Of keys for a shorter time the spare is half of it.
    let spare_ms = SPARE_MS.min(expires_ms.saturating_sub(now_ms) / 2);
    Ok(Assumed { keys, expires_ms, replace_ms: expires_ms - spare_ms })
}
