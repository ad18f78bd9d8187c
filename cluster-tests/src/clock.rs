//! The time of day, for signing and comparing, and a wrong one for a node under test.

use std::process::Command;

use tempfile::TempDir;

use crate::NodeOptions;

/// Epoch milliseconds.
#[expect(clippy::disallowed_methods, reason = "a test stands outside of the node, whose clock it checks")]
pub fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).expect("this century")
}

/// Epoch seconds.
pub fn now_s() -> u64 {
    now_ms() / 1000
}

/// The clock of the nodes started with [`ShiftedClock::under`], by a library that is loaded before the system's own and
/// changes its time calls.
pub struct ShiftedClock(TempDir);

impl Default for ShiftedClock {
    fn default() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(folder.path().join("clock.so"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/clock.c"))
            .arg("-ldl")
            .output()
            .expect("cc, which also links what rustc compiles");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self(folder)
    }
}

impl ShiftedClock {
    pub fn under(&self, options: NodeOptions) -> NodeOptions {
        options.environment("LD_PRELOAD", &self.0.path().join("clock.so").display().to_string())
    }

    /// Moves the time of day ahead, from now on.
    pub fn ahead(&self, seconds: i64) {
        let new = self.0.path().join("ahead.new");
        std::fs::write(&new, seconds.to_string()).expect("the folder is writable");
        std::fs::rename(new, self.0.path().join("ahead")).expect("the folder is writable");
    }
}
