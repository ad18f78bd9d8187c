//! The broker: everything that `fanfare serve` runs, as a library.

pub mod accounts;
pub mod auth;
pub mod model;
pub mod origin;
