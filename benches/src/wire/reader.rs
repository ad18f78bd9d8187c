//! Reading frames off a non-blocking socket into a buffer that all connections of a thread share.

use std::io::{self, Read};

use super::websocket::{first_frame, unmask};

/// Size of the shared buffer, enough for all that one wake-up of a connection brings.
pub const SHARED_BYTES: usize = 64 * 1024;

/// State of a connection between two reads: part of a frame, usually nothing.
#[derive(Default)]
pub struct Reader {
    partial: Vec<u8>,
}

impl Reader {
    pub fn with_bytes(partial: Vec<u8>) -> Self {
        Self { partial }
    }

    /// Reads until the socket is empty and hands over each frame's opcode and unmasked payload.
    ///
    /// The end of the stream is an `UnexpectedEof`, a frame larger than `shared` `InvalidData`.
    pub fn read(
        &mut self,
        stream: &mut impl Read,
        shared: &mut [u8],
        mut take: impl FnMut(u8, &[u8]),
    ) -> io::Result<()> {
        loop {
            let kept = self.partial.len();
            shared[..kept].copy_from_slice(&self.partial);
            let read = match stream.read(&mut shared[kept..]) {
                Ok(0) if kept == shared.len() => return Err(io::ErrorKind::InvalidData.into()),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let all = kept + read;
            let used = take_frames(&mut shared[..all], &mut take)?;
            self.partial.clear();
            self.partial.extend_from_slice(&shared[used..all]);
            // With edge-triggered epoll a short read means that the socket is empty; another read would cost a call.
            if all < shared.len() {
                return Ok(());
            }
        }
    }
}

/// Passes the complete frames to `take`, and returns their length in bytes.
fn take_frames(bytes: &mut [u8], take: &mut impl FnMut(u8, &[u8])) -> io::Result<usize> {
    let mut used = 0;
    while let Some(frame) = first_frame(&bytes[used..]).map_err(io::Error::other)? {
        let end = used + frame.payload.end;
        let payload = &mut bytes[used + frame.payload.start..end];
        if let Some(mask) = frame.mask {
            unmask(payload, mask);
        }
        take(frame.opcode, payload);
        used = end;
    }
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::websocket::{opcode, write_client};

    #[test]
    fn frames_cut_anywhere_come_out_whole() {
        let mut sent = Vec::new();
        let texts: Vec<String> = (0..40).map(|n| "y".repeat(n * 7)).collect();
        texts.iter().for_each(|text| write_client(opcode::TEXT, text.as_bytes(), &mut sent));
        for cut in [1, 3, 100, sent.len()] {
            let mut got = Vec::new();
            let mut reader = Reader::default();
            let mut shared = vec![0; 1024];
            for mut piece in sent.chunks(cut) {
                while !piece.is_empty() {
                    let take = |_: u8, text: &[u8]| got.push(String::from_utf8(text.to_vec()).unwrap());
                    if reader.read(&mut piece, &mut shared, take).is_err() {
                        break;
                    }
                }
            }
            assert_eq!(got, texts, "in pieces of {cut}");
        }
    }
}
