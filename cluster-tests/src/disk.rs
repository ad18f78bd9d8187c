//! A disk that can hang and be full, for an unchanged node: a library that is loaded before the system's own changes
//! the system calls.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::NodeOptions;

/// Switches for the nodes started with [`Disk::under`].
pub struct Disk(TempDir);

impl Default for Disk {
    fn default() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(folder.path().join("disk.so"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/disk.c"))
            .arg("-ldl")
            .output()
            .expect("cc, which also links what rustc compiles");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(folder)
    }
}

impl Disk {
    pub fn under(&self, options: NodeOptions) -> NodeOptions {
        options.environment("LD_PRELOAD", &self.0.path().join("disk.so").display().to_string())
    }

    /// Sets whether every sync hangs.
    pub fn hang(&self, hangs: bool) {
        self.switch("hangs", hangs);
    }

    /// Sets whether every write to a file fails.
    pub fn fill(&self, full: bool) {
        self.switch("full", full);
    }

    fn switch(&self, name: &str, on: bool) {
        let file: PathBuf = self.0.path().join(name);
        if on {
            std::fs::write(file, "").expect("the folder is writable");
        } else {
            std::fs::remove_file(file).expect("it was on");
        }
    }
}
