//! `/debug/members`: the cluster as this node sees it.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;

use super::{AdminState, json, refusal};

/// Facts of one node. Addresses are those that other nodes use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    pub node_id: String,
    /// 16 hexadecimal digits.
    pub incarnation: String,
    pub listen: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gossip: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    pub version: String,
    /// Minor version of the protocol between nodes.
    pub protocol_minor: u32,
    pub ready: bool,
    pub draining: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberView {
    #[serde(flatten)]
    pub node: NodeView,
    pub state: MemberState,
    /// True if this node can send to the member.
    pub link_up: bool,
    /// True if the member has sent its interest.
    pub interest_known: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberState {
    Alive,
    Suspect,
    Dead,
    /// Left after a clean end.
    Left,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MembersView {
    pub node: NodeView,
    /// All other members.
    pub members: Vec<MemberView>,
}

pub(super) async fn members(State(state): State<AdminState>) -> Response {
    let Some(view) = (state.members)() else {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "starting");
    };
    match serde_json::to_string(&view) {
        Ok(text) => json(StatusCode::OK, text),
        Err(_) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "internal"),
    }
}
