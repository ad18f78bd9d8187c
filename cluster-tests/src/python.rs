//! Python packages for tests.

use std::process::{Command, Stdio};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/python.sh");

/// Packages with their versions, as the `Makefile` fetches them.
pub const KOSOKU: [&str; 2] = ["kosoku", "0.1.0"];
pub const PIKA: [&str; 2] = ["pika", "1.4.4"];

/// Gives the Python interpreter with the package; `None` if it cannot be fetched, which `CI=true` forbids. Blocks.
pub fn python(package: [&str; 2]) -> Option<String> {
    let fetched = Command::new(SCRIPT).args(package).stdin(Stdio::null()).output().expect("a shell");
    if !fetched.status.success() {
        let [name, _] = package;
        crate::not_run(&format!("{name} cannot be installed: {}", String::from_utf8_lossy(&fetched.stderr)));
        return None;
    }
    Some(String::from_utf8(fetched.stdout).expect("a path").trim_end().to_owned())
}
