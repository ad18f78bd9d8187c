//! What Fanfare costs, beside what it would cost if there were nothing but the sockets and the disk.
//!
//! `run` holds the comparisons; `load`, `floor`, `store_loop`, `burn`, `link` and `cql` are the processes they start.

pub mod burn;
pub mod cql;
pub mod floor;
pub mod histogram;
pub mod link;
pub mod load;
pub mod os;
pub mod procfs;
pub mod run;
pub mod store_loop;
pub mod wire;

/// An error that ends a measurement; its text says which step failed.
pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T> = std::result::Result<T, Error>;
