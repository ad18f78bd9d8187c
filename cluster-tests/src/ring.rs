//! An io_uring that is refused or fails, under a node that runs as it always does: its calls to the system pass a library
//! that is loaded before the system's own.

use std::process::Command;

use tempfile::TempDir;

use crate::NodeOptions;

/// An io_uring for the nodes that are started with [`Ring::under`].
pub struct Ring(TempDir);

impl Ring {
    /// The system refuses it, as it does in a container.
    pub fn refused() -> Self {
        Self::that("refused")
    }

    /// Each call takes half of what it is given, and one of the first takes half and fails.
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
