//! A directory with one random key, for a node that was started with nothing.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::data_file::write_private;
use crate::model::random_bytes;

const KEY_NAME: &str = "dev";

/// Where the files are; both hold the secret and have mode 0600.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Development {
    pub directory: PathBuf,
    /// One line, the key as `<secret>.<keyName>`.
    pub key_file: PathBuf,
    /// False: they were there already.
    pub created: bool,
}

/// Makes `directory.toml` and `dev-key` in the data folder, and the folder, unless the first is there.
pub fn create(data_dir: &Path) -> io::Result<Development> {
    let files = Development {
        directory: data_dir.join("directory.toml"),
        key_file: data_dir.join("dev-key"),
        created: false,
    };
    if files.directory.try_exists()? {
        return Ok(files);
    }
    make_private_folder(data_dir)?;
    let secret = URL_SAFE_NO_PAD.encode(random_bytes::<24>());
    // The directory comes last: while it is missing, another start makes both again.
    write_private(&files.key_file, format!("{secret}.{KEY_NAME}\n").as_bytes())?;
    write_private(&files.directory, directory_text(&secret).as_bytes())?;
    Ok(Development { created: true, ..files })
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

/// With the folders that it lies in, for nobody else to enter. What is there is left as it is.
pub fn make_private_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
