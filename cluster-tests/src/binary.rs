//! The binary under test, built once by each test executable, unless `NODE_IS_BUILT` says that it is there.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The `fanfare` beside this test executable, of the same profile.
pub(crate) fn path() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(find)
}

fn find() -> PathBuf {
    let executable = env::current_exe().expect("the test executable has a path");
    let profile_folder =
        executable.parent().and_then(Path::parent).expect("<target>/<profile>/deps/<test>").to_path_buf();
    let binary = profile_folder.join("fanfare");
    if env::var("NODE_IS_BUILT").as_deref() == Ok("true") {
        assert!(binary.is_file(), "NODE_IS_BUILT is true, and there is no {}", binary.display());
        return binary;
    }
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
    binary
}
