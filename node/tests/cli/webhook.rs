//! `fanfare webhook listen`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use fanfare::model::Clock;
use fanfare_proto::webhook as wire;

use super::{fanfare, run};

const BODY: &str = r#"{"items":[{"data":1},{"data":2}]}"#;

/// Ended when dropped.
struct Listener {
    child: Child,
    address: String,
}

impl Listener {
    fn start(folder: &std::path::Path, arguments: &[&str]) -> Self {
        let mut command = fanfare(folder, &["webhook", "listen", "--listen", "127.0.0.1:0"]);
        let command = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let mut line = String::new();
        let stderr = child.stderr.as_mut().expect("a pipe");
        BufReader::new(stderr).read_line(&mut line).expect("it says where it listens");
        let address = line.trim().strip_prefix("fanfare: listening on http://").expect(&line).to_owned();
        Self { child, address }
    }

    /// The status of the answer.
    fn post(&self, secret: &[u8]) -> u16 {
        let timestamp = Clock::system().now_ms().to_string();
        let signature = wire::signature(secret, &timestamp, BODY.as_bytes());
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let head = format!(
            "POST /any HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n{}: e1\r\n{}: a%2Fb\r\n\
             {}: channel.message\r\n{}: {timestamp}\r\n{}: {signature}\r\n\r\n{BODY}",
            BODY.len(),
            wire::EVENT_ID,
            wire::CHANNEL,
            wire::SOURCE,
            wire::TIMESTAMP,
            wire::SIGNATURE,
        );
        stream.write_all(head.as_bytes()).expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        status.expect(&answer)
    }

    fn lines(mut self) -> String {
        self.child.kill().expect("it runs");
        let mut lines = String::new();
        self.child.stdout.take().expect("a pipe").read_to_string(&mut lines).expect("UTF-8");
        lines
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
fn a_listener_prints_each_event_and_its_verdict() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hook.secret"), "s\n").unwrap();
    let line = "e1 a/b channel.message 2 items, ";
    let unsigned = "not verified: the signature is not of this secret, timestamp and body";
    for arguments in [&["--secret", "s"][..], &["--secret-file", "hook.secret"]] {
        let listener = Listener::start(folder.path(), arguments);
        assert_eq!((listener.post(b"s"), listener.post(b"t")), (204, 401));
        assert_eq!(listener.lines(), format!("{line}verified\n{line}{unsigned}\n"), "{arguments:?}");
    }
    let listener = Listener::start(folder.path(), &["--status", "503", "--verbose", "--data-dir", "x"]);
    assert_eq!(listener.post(b"s"), 503);
    let items = "  {\"data\":1}\n  {\"data\":2}\n";
    assert_eq!(listener.lines(), format!("{line}not verified: no secret is given\n{items}"));
}

#[test]
fn wrong_use_of_a_listener_is_2_and_a_taken_port_1() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, reason) in [
        (&["webhook"][..], "listen"),
        (&["webhook", "listen", "--listen", "x"], "invalid value"),
        (&["webhook", "listen", "--status", "99"], "99 is not in 200..=599"),
        (&["webhook", "listen", "--secret", "a", "--secret-file", "b"], "cannot be used with"),
        (
            &["webhook", "listen", "--secret-file", "absent"],
            "--secret-file: cannot read absent: No such file",
        ),
    ] {
        let (code, _, stderr) = run(folder.path(), arguments);
        assert!(code == 2 && stderr.contains(reason), "{arguments:?} {code} {stderr}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, _, stderr) = run(folder.path(), &["webhook", "listen", "--listen", &address]);
    assert!(code == 1 && stderr.contains("cannot listen on"), "{code} {stderr}");
}
