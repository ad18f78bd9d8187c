use std::io::IoSlice;

use super::*;

const HANDSHAKE_BYTES: usize = 16 * 1024;

struct TlsTestPair {
    client: ClientConnection,
    server: Box<TlsConnection>,
    pipe: TlsTestPipe,
}

impl TlsTestPair {
    fn new() -> Self {
        let files = TestCertificate::new();
        let server = files.open().unwrap().accept(HANDSHAKE_BYTES).unwrap();
        Self { client: files.client(), server, pipe: TlsTestPipe::new() }
    }

    fn open() -> Self {
        let mut both = Self::new();
        while both.client.is_handshaking() {
            both.client_to_pipe();
            assert_eq!(both.read().unwrap_err().kind(), ErrorKind::WouldBlock);
            both.pipe_to_client();
        }
        both.client_to_pipe();
        assert_eq!(both.read().unwrap_err().kind(), ErrorKind::WouldBlock);
        both.pipe_to_client();
        both
    }

    fn client_to_pipe(&mut self) {
        while self.client.wants_write() {
            self.client.write_tls(&mut self.pipe.incoming).unwrap();
        }
    }

    /// The plaintext that the client reads of everything the server has written.
    fn pipe_to_client(&mut self) -> Vec<u8> {
        let (outgoing, mut text) = (std::mem::take(&mut self.pipe.outgoing), Vec::new());
        let mut rest = &outgoing[..];
        while !rest.is_empty() {
            self.client.read_tls(&mut rest).unwrap();
            self.client.process_new_packets().unwrap();
            self.client.reader().read_to_end(&mut text).ok();
        }
        text
    }

    fn say(&mut self, bytes: &[u8]) {
        self.client.set_buffer_limit(None);
        self.client.writer().write_all(bytes).unwrap();
        self.client_to_pipe();
    }

    /// Reads once into a buffer of 1000 bytes.
    fn read(&mut self) -> io::Result<(Vec<u8>, bool)> {
        let mut buffer = [0; 1000];
        let taken = self.server.read(&mut self.pipe, &mut buffer)?;
        Ok((buffer[..taken.bytes].to_vec(), taken.more))
    }

    fn read_all(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while let Ok((bytes, more)) = self.read() {
            all.extend_from_slice(&bytes);
            if !more {
                break;
            }
        }
        all
    }
}

fn text(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

#[test]
fn tls_client_data_is_read_whole_and_in_order() {
    let mut both = TlsTestPair::open();
    let text = text(200_000);
    both.say(&text);
    assert_eq!(both.read_all(), text);
    assert_eq!(both.read().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn every_split_of_a_handshake_and_a_text_is_read() {
    let mut both = TlsTestPair::new();
    let mut sent = Vec::new();
    let mut got = Vec::new();
    for _ in 0..2000 {
        while both.client.wants_write() {
            both.client.write_tls(&mut sent).unwrap();
        }
        let Some(next) = sent.first().copied() else {
            if both.client.is_handshaking() || sent.capacity() == 0 {
                both.pipe_to_client();
                continue;
            }
            if got == b"hello" {
                return;
            }
            both.pipe_to_client();
            both.client.writer().write_all(b"hello").unwrap();
            continue;
        };
        sent.remove(0);
        both.pipe.incoming.push_back(next);
        if let Ok((bytes, _)) = both.read() {
            got.extend_from_slice(&bytes);
        }
        both.pipe_to_client();
    }
    panic!("only {:?} came", String::from_utf8_lossy(&got));
}

#[test]
fn a_full_socket_bounds_what_is_taken_and_loses_nothing() {
    let mut both = TlsTestPair::open();
    let text = text(300_000);
    both.pipe.capacity = 10_000;
    let parts: Vec<_> = text.chunks(700).map(IoSlice::new).collect();
    let taken = both.server.write(&mut both.pipe, &parts).unwrap();
    assert!((10_000..100_000).contains(&taken), "{taken} bytes were taken");
    assert!(both.server.wants_write());
    assert!(both.server.take_progress());
    let again = both.server.write(&mut both.pipe, &[IoSlice::new(&text)]);
    assert_eq!(again.unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(!both.server.take_progress(), "the socket took nothing");
    both.pipe.capacity = 1;
    assert_eq!(both.server.flush(&mut both.pipe).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(both.server.take_progress(), "a byte is progress");
    both.pipe.capacity = usize::MAX;
    let mut at = taken;
    while at < text.len() {
        at += both.server.write(&mut both.pipe, &[IoSlice::new(&text[at..])]).unwrap();
    }
    assert!(!both.server.wants_write());
    assert_eq!(both.pipe_to_client(), text);
}

#[test]
fn close_notify_ends_the_stream_behind_what_was_said() {
    let mut both = TlsTestPair::open();
    both.client.writer().write_all(b"last words").unwrap();
    both.client.send_close_notify();
    both.client_to_pipe();
    assert_eq!(both.read().unwrap(), (b"last words".to_vec(), true));
    assert_eq!(both.read().unwrap(), (Vec::new(), false));
    both.server.write(&mut both.pipe, &[IoSlice::new(b"answer")]).unwrap();
    assert_eq!(both.pipe_to_client(), b"answer", "a half-closed client is still answered");
    both.server.close(&mut both.pipe).unwrap();
    both.pipe_to_client();
    assert_eq!(both.client.reader().read(&mut [0; 9]).unwrap(), 0, "close_notify came");
}

#[test]
fn a_stream_that_is_cut_ends_too() {
    let mut both = TlsTestPair::open();
    both.say(b"last words");
    both.pipe.ended = true;
    assert_eq!(both.read().unwrap(), (b"last words".to_vec(), true));
    assert_eq!(both.read().unwrap(), (Vec::new(), false));

    let mut early = TlsTestPair::new();
    early.pipe.ended = true;
    assert_eq!(early.read().unwrap(), (Vec::new(), false), "before the handshake");
}

#[test]
fn non_tls_input_is_refused_permanently() {
    let mut both = TlsTestPair::new();
    both.pipe.incoming.extend(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(both.read().unwrap_err().kind(), ErrorKind::InvalidData);
    assert_eq!(both.pipe.outgoing.first(), Some(&21), "an alert");
    assert_eq!(both.read().unwrap_err().kind(), ErrorKind::InvalidData);

    let mut both = TlsTestPair::open();
    both.say(b"before");
    both.pipe.incoming.extend([23, 3, 3, 0, 20].into_iter().chain([0; 20]));
    assert_eq!(
        both.read().unwrap(),
        (b"before".to_vec(), true),
        "a forged record does not undo what was said"
    );
    assert_eq!(both.read().unwrap_err().kind(), ErrorKind::InvalidData);
}

#[test]
fn a_handshake_takes_no_more_than_it_may() {
    let mut both = TlsTestPair::new();
    // A ClientHello that claims 60000 bytes, in records of 8000.
    let mut hello = vec![1, 0, 0xEA, 0x60];
    hello.resize(60_004, 0);
    for part in hello.chunks(8000) {
        both.pipe.incoming.extend([22, 3, 1]);
        both.pipe.incoming.extend(u16::try_from(part.len()).unwrap().to_be_bytes());
        both.pipe.incoming.extend(part);
    }
    let error = both.read().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert!(both.pipe.incoming.len() > 40_000, "{} bytes were left", both.pipe.incoming.len());
}

#[test]
fn records_that_carry_nothing_do_not_hold_up_the_others() {
    let mut both = TlsTestPair::open();
    for _ in 0..2000 {
        both.client.refresh_traffic_keys().unwrap();
        both.client_to_pipe();
    }
    let before = both.pipe.incoming.len();
    let first = both.read().unwrap_err().kind();
    assert!(matches!(first, ErrorKind::Interrupted | ErrorKind::InvalidData), "{first}");
    assert!(both.pipe.incoming.len() <= before);
    let mut reads = 0;
    while both.read().is_err_and(|error| error.kind() == ErrorKind::Interrupted) {
        reads += 1;
        assert!(reads < 100, "endless");
    }
    assert!(both.pipe.outgoing.len() < 64 * 1024, "answers pile up: {}", both.pipe.outgoing.len());
}
