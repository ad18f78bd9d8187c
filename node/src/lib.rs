//! The broker: everything that `fanfare serve` runs, as a library.
//!
//! `docs/architecture.md` is the map; `docs/lifetime-of-a-message.md` walks one message through it.

pub mod accounts;
pub mod app;
pub mod auth;
pub mod cli;
pub mod cluster;
pub mod config;
pub mod data_file;
pub mod dns_cache;
pub mod edge;
pub mod hub;
pub mod model;
pub mod origin;
pub mod publish;
pub mod session;
pub mod stall_detector;
pub mod tasks;
pub mod telemetry;
#[cfg(test)]
mod testing;
pub mod tls;
