//! Benchmarks: the cost of Fanfare beside a baseline of nothing but sockets and disk.
//!
//! `run` holds the comparisons; `load`, `baseline`, `store_loop`, `burn`, `link`, `cql` and `targets` are the processes
//! they start.

use std::fmt;

pub mod baseline;
pub mod burn;
pub mod cql;
pub mod histogram;
pub mod link;
pub mod load;
pub mod os;
pub mod procfs;
pub mod run;
pub mod shares;
pub mod store_loop;
pub mod targets;
pub mod wire;

/// Error that ends a measurement; its text says which step failed.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T> = std::result::Result<T, Error>;

/// Result of a valid measurement in which the server could not keep up with the rate, with the reason.
#[derive(Debug)]
pub struct NotCarried(pub String);

impl NotCarried {
    /// Exit code of a generator with this result; its stdout has the reason.
    pub const EXIT_CODE: u8 = 3;
}

impl fmt::Display for NotCarried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotCarried {}
