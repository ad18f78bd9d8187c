//! Codings of request bodies.

use std::io::{self, Read};

use axum::http::HeaderMap;
use axum::http::header::CONTENT_ENCODING;
use flate2::read::{MultiGzDecoder, ZlibDecoder};

use crate::edge::errors::HttpRefusal;

/// Buffer size for inflating bytes that are only counted.
const COUNTED_BYTES: usize = 16 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    Identity,
    Gzip,
    /// Format of zlib (RFC 9110 §8.4.1.2).
    Deflate,
}

impl Coding {
    /// The coding of a body. None: an unknown one, or several.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let values = headers.get_all(CONTENT_ENCODING).iter();
        let names = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
        let mut coding = Self::Identity;
        for name in names.map(<[u8]>::trim_ascii).filter(|name| !name.is_empty()) {
            let named = match &*name.to_ascii_lowercase() {
                b"identity" => continue,
                b"gzip" | b"x-gzip" => Self::Gzip,
                b"deflate" => Self::Deflate,
                _ => return None,
            };
            if coding != Self::Identity {
                return None;
            }
            coding = named;
        }
        Some(coding)
    }

    /// Length of the decoded text; none if it exceeds `bytes_max`. Takes some 50 KB of memory, however long the text is.
    pub(super) fn count(self, encoded: &[u8], bytes_max: usize) -> Result<Option<usize>, HttpRefusal> {
        let mut reader = self.reader(encoded, bytes_max);
        let (mut bytes, mut part) = (0, vec![0; COUNTED_BYTES]);
        loop {
            match reader.read(&mut part).map_err(refused)? {
                0 => return Ok((bytes <= bytes_max).then_some(bytes)),
                count => bytes += count,
            }
        }
    }

    /// Appends the decoded text, whose length is `bytes`.
    pub(super) fn inflate(self, encoded: &[u8], bytes: usize, text: &mut Vec<u8>) -> Result<(), HttpRefusal> {
        text.reserve_exact(bytes);
        self.reader(encoded, bytes).read_to_end(text).map(drop).map_err(refused)
    }

    /// Decoder that ends one byte after `bytes_max`.
    fn reader(self, encoded: &[u8], bytes_max: usize) -> Box<dyn Read + '_> {
        let most = (bytes_max as u64).saturating_add(1);
        match self {
            Self::Identity => Box::new(encoded.take(most)),
            Self::Gzip => Box::new(MultiGzDecoder::new(encoded).take(most)),
            Self::Deflate => Box::new(ZlibDecoder::new(encoded).take(most)),
        }
    }
}

fn refused(_: io::Error) -> HttpRefusal {
    HttpRefusal::malformed("the body is not encoded as content-encoding says")
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use axum::http::HeaderValue;
    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};

    use super::*;

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text).expect("into memory");
        encoder.finish().expect("into memory")
    }

    fn zlib(text: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text).expect("into memory");
        encoder.finish().expect("into memory")
    }

    fn inflated(coding: Coding, encoded: &[u8], bytes_max: usize) -> Option<Vec<u8>> {
        let bytes = coding.count(encoded, bytes_max).ok()??;
        let mut text = Vec::new();
        coding.inflate(encoded, bytes, &mut text).ok()?;
        assert_eq!(text.len(), bytes);
        Some(text)
    }

    #[test]
    fn codings_are_named_once_in_any_case() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_ENCODING, HeaderValue::from_static(value));
            }
            Coding::of(&headers)
        };
        for values in [&[][..], &[""], &["identity"], &["identity, identity"]] {
            assert_eq!(of(values), Some(Coding::Identity), "{values:?}");
        }
        for values in [&["gzip"][..], &["x-gzip"], &["GZip"], &["identity, gzip"], &["identity", " gzip "]] {
            assert_eq!(of(values), Some(Coding::Gzip), "{values:?}");
        }
        assert_eq!(of(&["Deflate"]), Some(Coding::Deflate));
        for values in
            [&["br"][..], &["zstd"], &["gzip, gzip"], &["gzip", "deflate"], &["gzip, br"], &["gzip;q=1"]]
        {
            assert_eq!(of(values), None, "{values:?}");
        }
    }

    #[test]
    fn a_text_of_exactly_its_limit_passes_and_one_past_does_not() {
        for text in [&b""[..], b"x", &[b'x'; 100_000]] {
            for (coding, encoded) in [(Coding::Gzip, gzip(text)), (Coding::Deflate, zlib(text))] {
                assert_eq!(inflated(coding, &encoded, text.len()).as_deref(), Some(text));
                let Some(less) = text.len().checked_sub(1) else { continue };
                assert_eq!(coding.count(&encoded, less).expect("well encoded"), None);
            }
        }
        let members = [gzip(b"one "), gzip(b"two")].concat();
        assert_eq!(inflated(Coding::Gzip, &members, 10).as_deref(), Some(&b"one two"[..]));
        assert_eq!(Coding::Gzip.count(&members, 6).expect("well encoded"), None);
    }

    #[test]
    fn a_body_that_is_encoded_otherwise_or_cut_is_refused() {
        let text = b"some text, some text, some text";
        let mut raw = DeflateEncoder::new(Vec::new(), Compression::best());
        raw.write_all(text).expect("into memory");
        let raw = raw.finish().expect("into memory");
        let cut = |encoded: Vec<u8>| encoded[..encoded.len() - 1].to_vec();
        let mut wrong = gzip(text);
        let sum = wrong.len() - 8;
        wrong[sum] ^= 1;
        for (coding, encoded) in [
            (Coding::Gzip, text.to_vec()),
            (Coding::Gzip, zlib(text)),
            (Coding::Gzip, cut(gzip(text))),
            (Coding::Gzip, wrong),
            (Coding::Gzip, [gzip(text), b"more".to_vec()].concat()),
            (Coding::Gzip, Vec::new()),
            (Coding::Deflate, gzip(text)),
            (Coding::Deflate, raw),
            (Coding::Deflate, cut(zlib(text))[..10].to_vec()),
        ] {
            assert!(coding.count(&encoded, 1_000).is_err(), "{coding:?} {encoded:?}");
        }
    }
}
