//! The cluster key: the secret that all nodes of a cluster share.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::model::bare_secret;

const SECRET_BYTES: usize = 32;
/// Upper bound of the key file, longer than two lines of base64 need.
const FILE_BYTES_MAX: usize = 1024;

/// One secret, or two while the key is rotated: the first one seals, both open. Each use derives a key of its own.
#[derive(Clone)]
pub struct ClusterKey(Vec<Prk>);

impl ClusterKey {
    /// Reads the file of `--cluster-key-file`.
    pub fn open(path: &Path) -> Result<Self, ClusterKeyError> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| ClusterKeyError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(&text).ok_or_else(|| ClusterKeyError::Malformed { path: path.to_owned() })
    }

    /// Parses one or two lines, each the base64 of 32 bytes.
    pub fn parse(text: &str) -> Option<Self> {
        if text.len() > FILE_BYTES_MAX {
            return None;
        }
        let salt = Salt::new(HKDF_SHA256, b"fanfare cluster key");
        let secret = |line: &str| STANDARD.decode(line).ok().filter(|secret| secret.len() == SECRET_BYTES);
        let lines = bare_secret(text).ok()?.lines().map(str::trim).filter(|line| !line.is_empty());
        let secrets: Vec<_> = lines.map(|line| Some(salt.extract(&secret(line)?))).collect::<Option<_>>()?;
        (1..=2).contains(&secrets.len()).then_some(Self(secrets))
    }

    /// Derives one key from each secret for this `purpose` and `context`. The first key is the one that seals.
    pub fn derive<'a, const N: usize>(
        &'a self,
        purpose: &str,
        context: &[u8],
    ) -> impl Iterator<Item = [u8; N]> + use<'a, N> {
        let info = [purpose.as_bytes(), &[0], context].concat();
        self.0.iter().map(move |secret| {
            let mut key = [0; N];
            let derived =
                secret.expand(&[&info], DerivedKeyLength(N)).and_then(|output| output.fill(&mut key));
            derived.expect("so few bytes can be derived");
            key
        })
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(…)")
    }
}

struct DerivedKeyLength(usize);

impl KeyType for DerivedKeyLength {
    fn len(&self) -> usize {
        self.0
    }
}

/// The reason why the file of the cluster key was refused. The text holds nothing of the key.
#[derive(Debug)]
pub enum ClusterKeyError {
    Unreadable { path: PathBuf, source: io::Error },
    Malformed { path: PathBuf },
}

impl fmt::Display for ClusterKeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, source } => {
                let path = path.display();
                write!(
                    f,
                    "cannot read {path}: {source}; make it with `openssl rand -base64 32`, once for all nodes"
                )
            }
            Self::Malformed { path } => write!(
                f,
                "{} is not one or two lines of 32 bytes in base64; make it with `openssl rand -base64 32`, \
                 once for all nodes",
                path.display()
            ),
        }
    }
}

impl std::error::Error for ClusterKeyError {}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const OTHER: &str = "IAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    fn derived(text: &str, purpose: &str, context: &[u8]) -> Vec<[u8; 32]> {
        ClusterKey::parse(text).expect("a good key").derive(purpose, context).collect()
    }

    #[test]
    fn one_or_two_lines_of_32_bytes_are_taken() {
        for text in [
            ONE.to_owned(),
            format!("{ONE}\n"),
            format!("{ONE}\r\n"),
            format!("\n {ONE}\n"),
            format!("\u{feff}{ONE} \n"),
        ] {
            assert_eq!(derived(&text, "a", b""), derived(ONE, "a", b""), "{text:?}");
        }
        let both = derived(&format!("{OTHER}\n{ONE}\n"), "a", b"");
        assert_eq!(both, [derived(OTHER, "a", b""), derived(ONE, "a", b"")].concat());
        let long = format!("{ONE}\n{}", "\n".repeat(FILE_BYTES_MAX));
        let three = format!("{ONE}\n{ONE}\n{ONE}");
        let half = format!("{ONE}\nx");
        for text in ["", "\n", "AAEC", &ONE[1..], &ONE.replace('=', ""), &three, &half, &long] {
            assert!(ClusterKey::parse(text).is_none(), "{text:?}");
        }
    }

    #[test]
    fn each_purpose_and_context_has_a_key_of_its_own() {
        let keys = [
            derived(ONE, "a", b""),
            derived(ONE, "a", b"b"),
            derived(ONE, "ab", b""),
            derived(ONE, "b", b""),
            derived(OTHER, "a", b""),
        ];
        for (i, key) in keys.iter().enumerate() {
            assert!(!keys[..i].contains(key), "key {i}");
        }
    }

    #[test]
    fn nothing_shows_the_secret() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("key");
        assert_eq!(format!("{:?}", ClusterKey::parse(ONE).expect("a good key")), "ClusterKey(…)");
        std::fs::write(&file, &ONE[1..]).expect("the folder is writable");
        let error = ClusterKey::open(&file).expect_err("too short").to_string();
        assert!(error.contains("openssl rand -base64 32") && !error.contains(&ONE[1..8]), "{error}");
        let missing = ClusterKey::open(&folder.path().join("none")).expect_err("missing").to_string();
        assert!(missing.starts_with("cannot read ") && missing.contains("none"), "{missing}");
        std::fs::write(&file, ONE).expect("the folder is writable");
        ClusterKey::open(&file).expect("a good key");
    }
}
