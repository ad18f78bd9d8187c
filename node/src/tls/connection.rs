//! The server's side of TLS on one connection, over a socket that belongs to whoever serves it.

use std::io::{self, ErrorKind, IoSlice, Read, Write};

use rustls::ServerConnection;

use crate::telemetry::count_tls_failure;

/// What is encrypted and not taken by the socket. When it is full nothing more is taken to be encrypted.
const UNSENT_BYTES_MAX: usize = 64 * 1024;
/// Records read in one go: who sends such as carry nothing does not hold up the others.
const ROUNDS_MAX: usize = 64;

/// Sockets are non-blocking; [`ErrorKind::WouldBlock`] is theirs.
#[derive(Debug)]
pub struct TlsConnection {
    connection: ServerConnection,
    /// What the handshake may still take from the client.
    handshake_bytes: usize,
    /// How the client broke TLS; nothing more is read.
    broken: Option<rustls::Error>,
    /// The socket took something since [`TlsConnection::take_progress`].
    progress: bool,
}

/// What a read has put into its buffer. Nothing is the end of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    pub bytes: usize,
    /// There may be more without a further event of the socket.
    pub more: bool,
}

impl TlsConnection {
    pub(super) fn new(mut connection: ServerConnection, handshake_bytes: usize) -> Self {
        connection.set_buffer_limit(Some(UNSENT_BYTES_MAX));
        Self { connection, handshake_bytes, broken: None, progress: false }
    }

    /// Fills the buffer as far as the client has sent. What TLS has to answer goes out on the way.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] when the socket is empty, [`ErrorKind::Interrupted`] when it is to be read again
    /// although nothing has come of it yet.
    pub fn read(&mut self, socket: &mut (impl Read + Write), buffer: &mut [u8]) -> io::Result<Taken> {
        let mut bytes = 0;
        let result = self.fill(socket, buffer, &mut bytes);
        match result {
            // Whatever ended the reading shows again when there is nothing left before it.
            Err(error) if bytes > 0 => Ok(Taken { bytes, more: error.kind() != ErrorKind::WouldBlock }),
            Ok(()) => Ok(Taken { bytes, more: bytes > 0 }),
            Err(error) => Err(error),
        }
    }

    /// Ok when the buffer is full or the stream at its end.
    fn fill(
        &mut self,
        socket: &mut (impl Read + Write),
        buffer: &mut [u8],
        bytes: &mut usize,
    ) -> io::Result<()> {
        for _ in 0..ROUNDS_MAX {
            match self.connection.reader().read(&mut buffer[*bytes..]) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    *bytes += count;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // An end without close_notify: frames and bodies say themselves whether they are whole.
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(error),
            }
            self.take_records(socket)?;
        }
        Err(ErrorKind::Interrupted.into())
    }

    fn take_records(&mut self, socket: &mut (impl Read + Write)) -> io::Result<()> {
        if let Some(error) = &self.broken {
            return Err(io::Error::new(ErrorKind::InvalidData, error.clone()));
        }
        let handshaking = self.connection.is_handshaking();
        let count = self.connection.read_tls(socket)?;
        if handshaking {
            self.handshake_bytes = self.handshake_bytes.saturating_sub(count);
        }
        // What came before the break is still to be read, so it is told at the next call.
        self.broken = match self.connection.process_new_packets() {
            Ok(_) if handshaking && self.handshake_bytes == 0 => {
                Some(rustls::Error::General("the handshake is too long".to_owned()))
            }
            Ok(_) => None,
            Err(error) => Some(error),
        };
        if let Some(error) = self.broken.as_ref().filter(|_| handshaking) {
            count_tls_failure(error);
        }
        // For a broken one this is the alert.
        match self.flush(socket) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes what there is room for.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] as long as the socket has not taken what was written before.
    pub fn write(&mut self, socket: &mut impl Write, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush(socket)?;
        let count = self.connection.writer().write_vectored(slices)?;
        match self.flush(socket) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(count),
        }
    }

    /// Gives the socket what waits for it.
    pub fn flush(&mut self, socket: &mut impl Write) -> io::Result<()> {
        while self.connection.wants_write() {
            match self.connection.write_tls(socket) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => self.progress = true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub fn wants_write(&self) -> bool {
        self.connection.wants_write()
    }

    /// Whether the socket took anything since this was last asked.
    pub fn take_progress(&mut self) -> bool {
        std::mem::take(&mut self.progress)
    }

    /// Says that nothing more follows.
    pub fn close(&mut self, socket: &mut impl Write) -> io::Result<()> {
        self.connection.send_close_notify();
        self.flush(socket)
    }
}
