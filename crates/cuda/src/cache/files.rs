//! The folder and its files, such that no other user can have put anything there. Where there are no owners and modes
//! (not Unix) the system's own protection of the user's folders must do.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::path::Path;

#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};

/// Creates the folder for this user alone if it does not exist; refuses one that others own or can write to.
pub(super) fn make_folder(folder: &Path) -> Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    builder.mode(0o700);
    builder.create(folder)?;
    check_owner(&std::fs::metadata(folder)?, 0o022)
}

/// Refuses what another user owns or where the mode gives others any of these rights.
#[cfg(unix)]
fn check_owner(metadata: &std::fs::Metadata, refused: u32) -> Result<()> {
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        let text = format!("it belongs to user {owner}, and this process runs as user {user}");
        return Err(Error::new(ErrorKind::PermissionDenied, text));
    }
    let mode = metadata.mode() & 0o777;
    if mode & refused != 0 {
        let text = format!("its mode {mode:03o} gives rights to other users; use `chmod go-w` on it");
        return Err(Error::new(ErrorKind::PermissionDenied, text));
    }
    Ok(())
}

#[cfg(not(unix))]
fn check_owner(_metadata: &std::fs::Metadata, _refused: u32) -> Result<()> {
    Ok(())
}

/// What a file holds, no longer than `limit`. Refuses symbolic links and what another user owns or could have written
/// (`private`: could have read).
pub(super) fn read(path: &Path, limit: u64, private: bool) -> Result<(File, Vec<u8>)> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    options.custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.len() > limit {
        return Err(Error::new(ErrorKind::InvalidData, "it is not a file, or too large"));
    }
    check_owner(&metadata, if private { 0o077 } else { 0o022 })?;
    let mut bytes = Vec::new();
    (&file).take(limit).read_to_end(&mut bytes)?;
    Ok((file, bytes))
}

/// A new file for this user alone; an error if anything of that name is there, a symbolic link included.
pub(super) fn create(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    options.mode(0o600).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
    options.open(path)?.write_all(bytes)
}

/// Random bytes of the system.
pub(super) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::other(error.to_string()))?;
    Ok(bytes)
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn chmod(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn folders_are_made_for_the_user_alone() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("a/b");
        make_folder(&folder).unwrap();
        for made in [&folder, &place.path().join("a")] {
            assert_eq!(std::fs::metadata(made).unwrap().mode() & 0o777, 0o700);
        }
        chmod(&folder, 0o755);
        make_folder(&folder).unwrap();
        for open in [0o775, 0o757, 0o777] {
            chmod(&folder, open);
            let said = make_folder(&folder).unwrap_err().to_string();
            assert!(said.starts_with(&format!("its mode {open:03o} gives rights")), "{said}");
        }
    }

    #[test]
    fn folders_of_another_user_are_refused() {
        let place = tempfile::tempdir().unwrap();
        // Only root can give a folder away; for others the root folder is another user's.
        let given = std::os::unix::fs::chown(place.path(), Some(4711), None).is_ok();
        let said = make_folder(if given { place.path() } else { Path::new("/") }).unwrap_err().to_string();
        assert!(said.starts_with("it belongs to user "), "{said}");
        if given {
            std::os::unix::fs::chown(place.path(), Some(rustix::process::geteuid().as_raw()), None).unwrap();
        }
    }

    #[test]
    fn neither_reading_nor_creating_follows_a_link() {
        let place = tempfile::tempdir().unwrap();
        let (file, link) = (place.path().join("file"), place.path().join("link"));
        create(&file, b"body").unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        assert_eq!(read(&file, 9, true).unwrap().1, b"body");
        symlink(&file, &link).unwrap();
        assert!(read(&link, 9, true).is_err());
        let target = place.path().join("target");
        let dangling = place.path().join("dangling");
        symlink(&target, &dangling).unwrap();
        for path in [&file, &link, &dangling] {
            assert_eq!(create(path, b"other").unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
        assert!(!target.exists());
        assert_eq!(std::fs::read(&file).unwrap(), b"body");
    }

    #[test]
    fn files_that_others_could_have_written_are_not_read() {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("file");
        create(&file, b"body").unwrap();
        chmod(&file, 0o644);
        assert!(read(&file, 9, false).is_ok());
        assert!(read(&file, 9, true).is_err());
        assert!(read(&file, 3, false).is_err());
        chmod(&file, 0o664);
        assert!(read(&file, 9, false).is_err());
        assert!(read(place.path(), 1 << 20, false).is_err());
    }
}
