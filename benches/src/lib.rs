//! What Fanfare costs, beside what it would cost if there were nothing but the sockets and the disk.
//!
//! `run` holds the comparisons; `load`, `floor`, `store_loop`, `burn`, `link`, `cql` and `targets` are the processes they start.

use std::fmt;

pub mod burn;
pub mod cql;
pub mod floor;
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

/// An error that ends a measurement; its text says which step failed.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T> = std::result::Result<T, Error>;

/// What a server could not do at the rate that was asked of it. The measurement is sound, and this is what it found.
#[derive(Debug)]
pub struct NotCarried(pub String);

impl NotCarried {
    /// With which a generator ends that found this; its stdout then has the reason.
    pub const EXIT_CODE: u8 = 3;
}

impl fmt::Display for NotCarried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotCarried {}
