//! The admin token: read from a given file, or generated in the data folder.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use subtle::ConstantTimeEq as _;

use crate::data_file;
use crate::model::{bare_secret, random_bytes};

/// Token that operators send as `authorization: Bearer`. `Debug` does not show it.
pub struct AdminToken(String);

/// The reason why there is no admin token; names the file, never its content.
#[derive(Debug)]
pub enum AdminTokenError {
    Unreadable {
        file: PathBuf,
        source: io::Error,
    },
    Unmade {
        file: PathBuf,
        source: io::Error,
    },
    /// Token that is quoted, empty, or not one line of visible ASCII.
    Malformed {
        file: PathBuf,
        reason: &'static str,
    },
}

impl AdminToken {
    /// Reads `<data_dir>/admin-token`, or creates it (mode 0600) if it is absent or empty.
    ///
    /// # Errors
    /// The file cannot be read or written, or holds no valid token.
    pub fn made_in(data_dir: &Path) -> Result<Self, AdminTokenError> {
        if let Some(token) = Self::kept_in(data_dir)? {
            return Ok(token);
        }
        let (file, token) = (file_in(data_dir), URL_SAFE_NO_PAD.encode(random_bytes::<32>()));
        data_file::write_private(&file, format!("{token}\n").as_bytes())
            .map_err(|source| AdminTokenError::Unmade { file, source })?;
        Ok(Self(token))
    }

    /// Reads `<data_dir>/admin-token`. None: the next start creates it. Earlier versions left it empty on a full disk.
    ///
    /// # Errors
    /// The file cannot be read, or holds no valid token.
    pub fn kept_in(data_dir: &Path) -> Result<Option<Self>, AdminTokenError> {
        let file = file_in(data_dir);
        match std::fs::read(&file) {
            Ok(text) if text.trim_ascii().is_empty() => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            _ => Self::read(&file).map(Some),
        }
    }

    /// Reads an existing file.
    ///
    /// # Errors
    /// The file cannot be read, or holds no valid token.
    pub fn read(file: &Path) -> Result<Self, AdminTokenError> {
        let text = std::fs::read_to_string(file)
            .map_err(|source| AdminTokenError::Unreadable { file: file.to_owned(), source })?;
        let malformed = |reason| AdminTokenError::Malformed { file: file.to_owned(), reason };
        let token = bare_secret(&text).map_err(malformed)?;
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(malformed("is not one line of visible ASCII"));
        }
        Ok(Self(token.to_owned()))
    }

    /// The `authorization` header of an operator's request.
    pub fn authorization(&self) -> String {
        format!("Bearer {}", self.0)
    }

    pub(super) fn is(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }
}

fn file_in(data_dir: &Path) -> PathBuf {
    data_dir.join("admin-token")
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(…)")
    }
}

impl fmt::Display for AdminTokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { file, .. } => write!(f, "cannot read {}", file.display()),
            Self::Unmade { file, .. } => write!(f, "cannot make {}", file.display()),
            Self::Malformed { file, reason } => {
                write!(f, "what {} holds is no admin token: it {reason}", file.display())
            }
        }
    }
}

impl std::error::Error for AdminTokenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreadable { source, .. } | Self::Unmade { source, .. } => Some(source),
            Self::Malformed { .. } => None,
        }
    }
}
