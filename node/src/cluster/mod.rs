//! What makes several nodes one service.

pub mod inbound;
pub mod link;
