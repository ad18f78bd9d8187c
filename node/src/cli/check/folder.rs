//! Check whether a folder can be created and written to, without leaving anything in it.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::Path;

/// Checks the folder. The error names it and the obstacle.
pub(super) fn may_be_written(folder: &Path) -> Result<(), String> {
    let shown = folder.display();
    for at in folder.ancestors().map(here) {
        match fs::metadata(at) {
            Ok(found) if !found.is_dir() => {
                return Err(format!("{shown} cannot be a folder: {} is a file", at.display()));
            }
            Ok(_) => return write_into(at).map_err(|error| refused(folder, at, &error)),
            Err(_) if at.is_symlink() => {
                return Err(format!("{shown} cannot be a folder: {} is a link to nothing", at.display()));
            }
            // The check of the parent folder says more.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(error) => return Err(refused(folder, at, &error)),
        }
    }
    Err(format!("{shown} cannot be made"))
}

fn refused(folder: &Path, at: &Path, error: &io::Error) -> String {
    if folder == at {
        format!("cannot write to {}: {error}", folder.display())
    } else {
        format!("cannot make {} in {}: {error}", folder.display(), at.display())
    }
}

/// The path, with the empty last ancestor of a relative path as the working directory.
fn here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

/// Creates an unnamed file where the system supports it, else one that exists for a moment.
fn write_into(folder: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt as _;

        let unnamed = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(folder);
        let is_unknown = |error: &io::Error| {
            matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT))
        };
        match unnamed {
            Err(error) if is_unknown(&error) => {}
            made => return made.map(drop),
        }
    }
    let named = folder.join(format!(".fanfare-check-{}", std::process::id()));
    OpenOptions::new().write(true).create_new(true).open(&named)?;
    fs::remove_file(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_there_or_can_be_made_is_good() {
        let folder = tempfile::tempdir().expect("a folder");
        for path in [folder.path().to_path_buf(), folder.path().join("a"), folder.path().join("a/b/c")] {
            assert_eq!(may_be_written(&path), Ok(()));
        }
        assert_eq!(may_be_written(Path::new("nowhere/at/all")), Ok(()));
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 0, "nothing is left");
    }

    #[test]
    fn obstacle_in_the_path_of_a_folder_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        fs::write(&file, "").expect("written");
        std::os::unix::fs::symlink("nothing", &link).expect("linked");
        for (path, reason) in [
            (file.clone(), format!("{} is a file", file.display())),
            (file.join("data"), format!("{} is a file", file.display())),
            (link.join("data"), format!("{} is a link to nothing", link.display())),
            (link.clone(), format!("{} is a link to nothing", link.display())),
            ("/proc/data".into(), "cannot make /proc/data in /proc: ".to_owned()),
        ] {
            let refused = may_be_written(&path).expect_err(&reason);
            assert!(refused.contains(&reason) && refused.contains(&*path.to_string_lossy()), "{refused}");
        }
    }
}
