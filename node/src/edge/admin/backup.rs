//! `/backup`: the data of this node's disk, as one stream.

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;

use super::{AdminState, refusal};
use crate::origin::backup::BackupRefusal;

pub(super) fn routes() -> Router<AdminState> {
    Router::new().route("/backup", get(backup))
}

async fn backup(State(state): State<AdminState>) -> Response {
    match (state.backup)().await {
        Ok(stream) => {
            ([(CONTENT_TYPE, "application/octet-stream")], Body::from_stream(stream)).into_response()
        }
        Err(error @ BackupRefusal::Busy) => refusal(StatusCode::CONFLICT, &error.to_string()),
        Err(BackupRefusal::Store(_)) => {
            refusal(StatusCode::SERVICE_UNAVAILABLE, "the store or the outbox cannot be read")
        }
    }
}
