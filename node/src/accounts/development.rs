//! Development directory with one random key, for a node that was started without a configuration.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::data_file::write_private;
use crate::model::random_bytes;

const KEY_NAME: &str = "dev";

/// Paths of the files; both contain the secret and have mode 0600.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DevelopmentFiles {
    pub directory: PathBuf,
    /// File with one line, the key as `<secret>.<keyName>`.
    pub key_file: PathBuf,
    /// False if the files existed already.
    pub created: bool,
}

/// Creates `directory.toml` and `dev-key` in the data folder, and the folder itself, unless `directory.toml` exists.
pub fn create(data_dir: &Path) -> io::Result<DevelopmentFiles> {
    let files = DevelopmentFiles {
        directory: data_dir.join("directory.toml"),
        key_file: data_dir.join("dev-key"),
        created: false,
    };
    if files.directory.try_exists()? {
        return Ok(files);
    }
    make_private_folder(data_dir)?;
    let secret = URL_SAFE_NO_PAD.encode(random_bytes::<24>());
    // The directory file comes last: while it is missing, another start creates both again.
    write_private(&files.key_file, format!("{secret}.{KEY_NAME}\n").as_bytes())?;
    write_private(&files.directory, directory_text(&secret).as_bytes())?;
    Ok(DevelopmentFiles { created: true, ..files })
}

fn directory_text(secret: &str) -> String {
    format!(
        r#"# Made for development, with a key that may do everything. Changes are applied while the node runs.

[[tenants]]
id = "dev"

[[tenants.accounts]]
id = "dev"

[[tenants.accounts.keys]]
name = "{KEY_NAME}"
secret = "{secret}"
capability = {{ "*" = ["subscribe", "publish", "presence", "history", "amqp-subscribe"] }}
"#
    )
}

/// Creates a folder and its parents, accessible to the owner alone. An existing folder is left unchanged.
pub fn make_private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
