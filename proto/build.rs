//! Makes the Rust types of `proto/peer/v1` without `protoc`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "peer")]
    peer::compile();
}

#[cfg(feature = "peer")]
mod peer {
    const FILES: [&str; 1] = ["peer/v1/peer.proto"];
    const FOLDER: &str = "proto";

    pub(crate) fn compile() {
        println!("cargo::rerun-if-changed={FOLDER}");
        let files = protox::compile(FILES, [FOLDER]).expect("the schema compiles");
        prost_build::Config::new()
            // A payload stays a part of the buffer that it came in.
            .bytes(["."])
            .compile_fds(files)
            .expect("the schema becomes Rust");
    }
}
