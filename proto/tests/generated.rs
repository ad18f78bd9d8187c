//! Comparison of the checked-in Rust types of `proto/peer/v1` with those that the schema gives. A build needs
//! no compiler of schemas.

use std::path::Path;

const SCHEMA: &str = "peer/v1/peer.proto";
const CHECKED_IN: &str = "src/peer/v1.rs";

/// The Rust types of the schema, as text.
fn generate() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().expect("a temporary folder");
    let schema = protox::compile([SCHEMA], [root.join("proto")]).expect("the schema compiles");
    prost_build::Config::new()
        // A payload stays a part of the buffer that it came in.
        .bytes(["."])
        .out_dir(out.path())
        .compile_fds(schema)
        .expect("the schema becomes Rust");
    std::fs::read_to_string(out.path().join("fanfare.peer.v1.rs")).expect("one file for the package")
}

#[test]
fn peer_types_match_the_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let checked_in = std::fs::read_to_string(root.join(CHECKED_IN)).expect("the types are checked in");
    let generated = generate();
    if generated != checked_in {
        let new = Path::new(env!("CARGO_TARGET_TMPDIR")).join("peer.v1.rs");
        std::fs::write(&new, generated).expect("the build folder is writable");
        panic!("proto/{CHECKED_IN} differs from the schema: cp {} proto/{CHECKED_IN}", new.display());
    }
}
