//! Atomic writes of files in the data folder: each is written aside and renamed, so that a full disk or a kill leaves the former content or
//! no file, never a part.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Replaces a file without a sync, for content that can be recreated after a power loss.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, |unfinished| {
        OpenOptions::new().write(true).create_new(true).open(unfinished)?.write_all(bytes)
    })
}

/// Replaces a file durably, with mode 0600 from the beginning.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, |unfinished| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(unfinished)?;
        file.write_all(bytes)?;
        file.sync_all()
    })
}

fn replace(path: &Path, fill: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".new");
    let unfinished = Path::new(&unfinished);
    if let Err(error) = fs::remove_file(unfinished)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    fill(unfinished).and_then(|()| fs::rename(unfinished, path)).inspect_err(|_| {
        fs::remove_file(unfinished).ok();
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_and_nothing_is_left_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("clock.json");
        fs::write(folder.path().join("clock.json.new"), "of a start that was killed").expect("written");
        for text in ["one", "two"] {
            write(&path, text.as_bytes()).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("read"), text);
        }
        write_private(&path, b"three").expect("written");
        assert_eq!(fs::read_to_string(&path).expect("read"), "three");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 1);
    }

    #[test]
    fn failed_write_leaves_the_previous_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin-token");
        let full = |unfinished: &Path| {
            fs::write(unfinished, "")?;
            Err(io::Error::from_raw_os_error(libc::ENOSPC))
        };
        replace(&path, full).expect_err("the disk is full");
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 0);
        write(&path, b"former").expect("written");
        replace(&path, full).expect_err("the disk is full");
        assert_eq!(fs::read_to_string(&path).expect("read"), "former");
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 1);
    }
}
