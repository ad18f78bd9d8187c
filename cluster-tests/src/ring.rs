//! An io_uring that is refused or fails, for an unchanged node: a library that is loaded before the system's own
//! changes the system calls.

use std::process::Command;

use tempfile::TempDir;

use crate::NodeOptions;

/// A faulty io_uring for the nodes started with [`Ring::under`].
pub struct Ring(TempDir);

impl Ring {
    /// Makes the system refuse io_uring, as it does in a container.
    pub fn refused() -> Self {
        Self::that("refused")
    }

    /// Makes each call do half of its writes, and one of the first calls fail after that.
    pub fn failing() -> Self {
        Self::that("fails")
    }

    fn that(does: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(folder.path().join("ring.so"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/ring.c"))
            .arg("-ldl")
            .output()
            .expect("cc, which also links what rustc compiles");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::write(folder.path().join(does), "").expect("the folder is writable");
        Self(folder)
    }

    pub fn under(&self, options: NodeOptions) -> NodeOptions {
        options.environment("LD_PRELOAD", &self.0.path().join("ring.so").display().to_string())
    }
}
