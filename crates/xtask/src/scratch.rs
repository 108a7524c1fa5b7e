//! Where tests keep their temporary files: in memory, if it has room. Training runs write thousands of small files and wait for
//! the disk with each, which was half of the time of the tests of commands.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The file system in memory.
const MEMORY: &str = "/dev/shm";
/// Tests have used a fifth of it (1.5 GB at most).
const LEAST_BYTES: u64 = 8 << 30;
const PREFIX: &str = "ironhorse-tests-";

/// A folder that is removed in the end.
pub struct Scratch(Option<PathBuf>);

impl Scratch {
    /// A folder in memory, or, where that does not work or TMPDIR is set, wherever temporary files go.
    pub fn new() -> Self {
        let memory = Path::new(MEMORY);
        let room = std::env::var_os("TMPDIR").is_none() && available().is_some_and(|is| is >= LEAST_BYTES);
        remove_left_behind(memory);
        Self(
            room.then(|| memory.join(format!("{PREFIX}{}", std::process::id()))).filter(|to| can_be_used(to)),
        )
    }

    /// Lets a program have its temporary files there.
    pub fn set(&self, command: &mut Command) {
        if let Some(folder) = &self.0 {
            command.env("TMPDIR", folder);
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(folder) = &self.0 {
            _ = std::fs::remove_dir_all(folder); // the next run tries again
        }
    }
}

/// Bytes that programs can use without swapping.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Whether it can be made and programs can be run from it: some tests compile one.
fn can_be_used(folder: &Path) -> bool {
    if std::fs::create_dir(folder).is_err() {
        return false;
    }
    let program = folder.join("true");
    let copied = std::fs::copy("/bin/true", &program).is_ok();
    let runs = copied && Command::new(&program).status().is_ok_and(|status| status.success());
    if !runs {
        _ = std::fs::remove_dir_all(folder);
    }
    runs
}

/// Removes the folders of processes that were killed.
fn remove_left_behind(memory: &Path) {
    for entry in std::fs::read_dir(memory).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let of = name.strip_prefix(PREFIX).and_then(|number| number.parse::<u32>().ok());
        if of.is_some_and(|of| !Path::new(&format!("/proc/{of}")).exists()) {
            _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_tried_and_removed() {
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join("tests");
        assert!(can_be_used(&folder) && folder.is_dir());
        assert!(!can_be_used(&folder), "there is one of that name");
        assert!(folder.is_dir(), "and it stays");
        let mut command = Command::new("sh");
        let scratch = Scratch(Some(folder.clone()));
        scratch.set(&mut command);
        assert_eq!(command.get_envs().next().unwrap().1, Some(folder.as_os_str()));
        drop(scratch);
        assert!(!folder.exists());
    }

    #[test]
    fn folders_of_processes_that_are_gone_are_removed() {
        let top = tempfile::tempdir().unwrap();
        let [gone, here, other] =
            [format!("{PREFIX}4294967295"), format!("{PREFIX}{}", std::process::id()), "other".into()]
                .map(|name| top.path().join(name));
        for folder in [&gone, &here, &other] {
            std::fs::create_dir(folder).unwrap();
        }
        remove_left_behind(top.path());
        assert_eq!([gone, here, other].map(|folder| folder.exists()), [false, true, true]);
    }
}
