//! The client protocol of Centrifugo, version 2: commands and replies, several of them in a frame.

pub mod json;
pub mod protobuf;
