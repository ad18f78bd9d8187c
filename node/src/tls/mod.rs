//! TLS of the client listener: its certificate, and one connection's part in it.

mod certificate;
mod connection;
#[cfg(test)]
mod tests;

pub use certificate::{CertificateError, Certificates};
pub use connection::{TlsConnection, TlsRead};
