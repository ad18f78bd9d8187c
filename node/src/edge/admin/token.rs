//! The operators' token: given in a file, or made in the data folder.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use subtle::ConstantTimeEq as _;

use crate::accounts::development::make_private_folder;
use crate::model::random_bytes;

/// What stands behind `authorization: Bearer` of an operator. `Debug` does not show it.
pub struct AdminToken(String);

/// Why there is no admin token; names the file, never its content.
#[derive(Debug)]
pub enum AdminTokenError {
    Io {
        file: PathBuf,
        source: io::Error,
    },
    /// Empty, or not one line of visible ASCII.
    Malformed {
        file: PathBuf,
    },
}

impl AdminToken {
    /// Reads `given`; without it reads `<data_dir>/admin-token`, or makes it (mode 0600) when absent.
    ///
    /// # Errors
    /// The file cannot be read or written, or holds no token.
    pub fn open(given: Option<&Path>, data_dir: &Path) -> Result<Self, AdminTokenError> {
        let file = given.map_or_else(|| data_dir.join("admin-token"), Path::to_path_buf);
        let io = |source| AdminTokenError::Io { file: file.clone(), source };
        if given.is_none() {
            make_private_folder(data_dir).map_err(io)?;
            make(&file).map_err(io)?;
        }
        let text = std::fs::read_to_string(&file).map_err(io)?;
        let token = text.trim();
        if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(AdminTokenError::Malformed { file });
        }
        Ok(Self(token.to_owned()))
    }

    pub(super) fn is(&self, given: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(given).into()
    }
}

/// Does nothing when the file is there.
fn make(file: &Path) -> io::Result<()> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(file) {
        Ok(mut made) => writeln!(made, "{}", URL_SAFE_NO_PAD.encode(random_bytes::<32>())),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken(…)")
    }
}

impl fmt::Display for AdminTokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { file, .. } => write!(f, "cannot read or make the admin token {}", file.display()),
            Self::Malformed { file } => {
                write!(f, "{} holds no admin token (one line of visible ASCII)", file.display())
            }
        }
    }
}

impl std::error::Error for AdminTokenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Malformed { .. } => None,
        }
    }
}
