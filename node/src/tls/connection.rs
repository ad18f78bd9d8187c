//! The server's side of TLS on one connection, over a socket of the caller.

use std::io::{self, ErrorKind, IoSlice, Read, Write};

use rustls::ServerConnection;

use crate::telemetry::count_tls_failure;

/// Encrypted bytes that the socket has not taken. When full, nothing more is encrypted.
const UNSENT_BYTES_MAX: usize = 64 * 1024;
/// Records read in one call, so that a client that sends empty records does not block others.
const ROUNDS_MAX: usize = 64;

/// TLS over a non-blocking socket; [`ErrorKind::WouldBlock`] is the socket's.
#[derive(Debug)]
pub struct TlsConnection {
    connection: ServerConnection,
    /// Bytes that the handshake may still take from the client.
    handshake_bytes: usize,
    /// The client's TLS error; nothing more is read.
    broken: Option<rustls::Error>,
    /// Whether the socket took something since [`TlsConnection::take_progress`].
    progress: bool,
}

/// Result of a read; 0 bytes is the end of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TlsRead {
    pub bytes: usize,
    /// Whether more may be readable without a further event of the socket.
    pub more: bool,
}

impl TlsConnection {
    pub(super) fn new(mut connection: ServerConnection, handshake_bytes: usize) -> Self {
        connection.set_buffer_limit(Some(UNSENT_BYTES_MAX));
        Self { connection, handshake_bytes, broken: None, progress: false }
    }

    /// Fills the buffer as far as the client has sent, and writes the answers of TLS on the way.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] when the socket is empty, [`ErrorKind::Interrupted`] when the caller should read again
    /// although nothing has come of it yet.
    pub fn read(&mut self, socket: &mut (impl Read + Write), buffer: &mut [u8]) -> io::Result<TlsRead> {
        let mut bytes = 0;
        let result = self.fill(socket, buffer, &mut bytes);
        match result {
            // The end of the reading recurs at the next call, when no bytes precede it.
            Err(error) if bytes > 0 => Ok(TlsRead { bytes, more: error.kind() != ErrorKind::WouldBlock }),
            Ok(()) => Ok(TlsRead { bytes, more: bytes > 0 }),
            Err(error) => Err(error),
        }
    }

    /// Reads until the buffer is full or the stream at its end.
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
                // An end without close_notify is accepted: frames and bodies know themselves whether they are complete.
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
        // Bytes before the error are still to be read, so it is reported at the next call.
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
        // After an error this sends the alert.
        match self.flush(socket) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }

    /// Encrypts as much as the buffer has space for.
    ///
    /// # Errors
    /// [`ErrorKind::WouldBlock`] while the socket has not taken the earlier bytes.
    pub fn write(&mut self, socket: &mut impl Write, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush(socket)?;
        let count = self.connection.writer().write_vectored(slices)?;
        match self.flush(socket) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
            _ => Ok(count),
        }
    }

    /// Writes the waiting bytes to the socket.
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

    /// Whether the socket took anything since the last call.
    pub fn take_progress(&mut self) -> bool {
        std::mem::take(&mut self.progress)
    }

    /// Sends close_notify.
    pub fn close(&mut self, socket: &mut impl Write) -> io::Result<()> {
        self.connection.send_close_notify();
        self.flush(socket)
    }
}
