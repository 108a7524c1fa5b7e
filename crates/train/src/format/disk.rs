//! The free space of a disk.

use std::path::Path;

use crate::{Error, Result};

/// The number of bytes that an unprivileged user may still write to the file system of `path`. If `path` does not
/// exist, the file system of the nearest existing folder above. `u64::MAX` on systems that do not report it.
#[cfg(unix)]
pub fn free_bytes(path: &Path) -> Result<u64> {
    use rustix::io::Errno;
    let absolute = std::path::absolute(path).map_err(|source| Error::io(path, "find", source))?;
    let mut last = Errno::NOENT;
    for at in absolute.ancestors() {
        match rustix::fs::statvfs(at) {
            Ok(facts) => return Ok(facts.f_bavail.saturating_mul(facts.f_frsize)),
            // ENOTDIR: a file is in the place of a folder, which will be reported when the folder is created
            Err(error @ (Errno::NOENT | Errno::NOTDIR)) => last = error,
            Err(Errno::NOSYS) => return Ok(u64::MAX),
            Err(error) => return Err(Error::io(path, "measure the free space", error.into())),
        }
    }
    Err(Error::io(path, "measure the free space", last.into()))
}

/// `u64::MAX`, because this system is not supported.
#[cfg(not(unix))]
pub fn free_bytes(_path: &Path) -> Result<u64> {
    Ok(u64::MAX)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn of_what_is_there_and_what_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let there = free_bytes(folder.path()).unwrap();
        let later = free_bytes(&folder.path().join("runs/x/step_00000010")).unwrap();
        assert!(there > 0);
        // the same file system; other processes may write to it between the two calls
        assert!(there.abs_diff(later) < there / 2 + (1 << 30), "{there} {later}");
        let file = folder.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(free_bytes(&file).is_ok() && free_bytes(&file.join("below")).is_ok());
        assert!(free_bytes(Path::new("")).is_err() && free_bytes(Path::new("relative/path")).is_ok());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_system_without_blocks_has_no_room() {
        if Path::new("/proc/self").exists() {
            assert_eq!(free_bytes(Path::new("/proc")).unwrap(), 0);
        }
    }
}
