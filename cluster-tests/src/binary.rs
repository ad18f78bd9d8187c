//! The binary under test: the one that `FANFARE_TEST_BINARY` names, else built once by each test executable.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The `fanfare` that is named, else that beside this test executable, built in the same profile.
pub(crate) fn path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| env::var_os("FANFARE_TEST_BINARY").map_or_else(build, PathBuf::from))
}

fn build() -> PathBuf {
    let executable = env::current_exe().expect("the test executable has a path");
    let profile_folder =
        executable.parent().and_then(Path::parent).expect("<target>/<profile>/deps/<test>").to_path_buf();
    let target_folder = profile_folder.parent().expect("the target folder");
    let profile = match profile_folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--quiet", "--package", "fanfare", "--bin", "fanfare", "--profile", profile])
        .arg("--target-dir")
        .arg(target_folder)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "the node does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    profile_folder.join("fanfare")
}
