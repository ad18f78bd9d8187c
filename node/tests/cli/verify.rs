//! The programs of the guide that verify a webhook, with signatures of the node.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fanfare::model::Clock;
use fanfare_proto::webhook::signature;

/// Language, file, command in front of the file, argument that prints the version.
const PROGRAMS: [(&str, &str, &[&str], &str); 4] = [
    ("js", "verify.mjs", &["node"], "--version"),
    ("python", "verify.py", &["python3"], "--version"),
    ("ruby", "verify.rb", &["ruby"], "--version"),
    ("go", "verify.go", &["go", "run"], "version"),
];
/// Language that may be missing also in CI, which must have the others.
const MAY_BE_MISSING: &str = "ruby";
const SECRET: &str = "hook-secret";

fn guides() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guides")
}

fn is_there(program: &str, version: &str) -> bool {
    let run = Command::new(program).arg(version).stdout(Stdio::null()).stderr(Stdio::null()).status();
    run.is_ok_and(|status| status.success())
}

fn verdict(file: &str, command: &[&str], arguments: [&str; 3], body: &[u8]) -> String {
    let mut run = Command::new(command[0]);
    run.args(&command[1..]).arg(guides().join("verify").join(file)).args(arguments);
    // Go keeps the compiled parts of its library there for the next run.
    run.env("GOCACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("go")).env("GO111MODULE", "off");
    let mut run = run.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it was there");
    run.stdin.take().expect("a pipe").write_all(body).expect("it reads");
    let output = run.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{file} ended with {}", output.status);
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn programs_of_the_guide_verify_what_a_node_signs() {
    let now_ms = Clock::system().now_ms();
    let (now, old) = (now_ms.to_string(), (now_ms - 10 * 60 * 1000).to_string());
    let body = "{\"channel\":\"a\",\"items\":[{\"data\":\"é\\u0000\"}]}\n".as_bytes();
    let good = signature(SECRET.as_bytes(), &now, body);
    let (of_old, of_other) = (signature(SECRET.as_bytes(), &old, body), signature(b"other", &now, body));
    for (language, file, command, version) in PROGRAMS {
        if !is_there(command[0], version) {
            let is_needed = std::env::var("CI").is_ok_and(|ci| ci == "true") && language != MAY_BE_MISSING;
            assert!(!is_needed, "{} is missing, so {file} cannot be tried", command[0]);
            // Written directly to stderr, since the test's captured output would not be shown.
            writeln!(std::io::stderr(), "{} is missing, so {file} was not tried", command[0]).ok();
            continue;
        }
        for (timestamp, signature, body, expected) in [
            (&now, good.as_str(), body, "verified\n"),
            (&now, &good, &body[1..], "refused\n"),
            (&now, &of_other, body, "refused\n"),
            (&old, &of_old, body, "refused\n"),
            (&now, &good[..good.len() - 1], body, "refused\n"),
            (&"soon".to_owned(), &good, body, "refused\n"),
        ] {
            let found = verdict(file, command, [SECRET, timestamp, signature], body);
            assert_eq!(found, expected, "{file} {timestamp} {signature}");
        }
    }
}

#[test]
fn the_guide_shows_the_programs_as_they_are() {
    let page = std::fs::read_to_string(guides().join("webhooks.md")).expect("the page");
    for (language, file, ..) in PROGRAMS {
        let program = std::fs::read_to_string(guides().join("verify").join(file)).expect("the program");
        assert!(page.contains(&format!("```{language}\n{program}```\n")), "{file} differs in webhooks.md");
    }
}

#[test]
fn the_directory_of_each_guide_is_a_good_one() {
    let guides_and_directories =
        [("webhook.toml", "webhooks.md"), ("aws.toml", "aws.md"), ("amqp.toml", "amqp.md")];
    for (directory, guide) in guides_and_directories {
        let folder = tempfile::tempdir().unwrap();
        let path = guides().join(directory);
        let path = path.to_str().expect("UTF-8");
        let arguments = ["check-config", "--directory", path, "--webhook-allow", "127.0.0.1"];
        let (code, stdout, stderr) = super::run(folder.path(), &arguments);
        assert_eq!((code, stdout.contains("is good"), &*stderr), (0, true, ""));
        let page = std::fs::read_to_string(guides().join(guide)).expect("the page");
        let text = std::fs::read_to_string(path).expect("the directory");
        let integration = text.split_once("[[tenants.accounts.integrations]]").expect("an integration").1;
        assert!(page.contains(integration), "the integration of {directory} differs in {guide}");
    }
}
