//! Lets every operation of a write fail once, in every way: afterwards the target is either the old or the new one,
//! complete.

use std::collections::BTreeMap;
use std::process::Command;

use super::faults::{Kind, VARIABLE, inject};
use super::*;

/// Tells the child process of [`a_death_at_any_operation_is_swept`] which folder to write.
const CHILD_FOLDER: &str = "IRONHORSE_FAULT_FOLDER";

/// Three files, one of them longer than a writer's buffer so that it takes several writes.
fn contents(of: &str) -> BTreeMap<String, Vec<u8>> {
    let file = |name: &str, len: usize| (name.to_owned(), of.as_bytes().repeat(len));
    [file("a", 1), file("b", 10_000), file("c", 3)].into()
}

fn write(path: &Path, of: &str) -> Result<()> {
    let owned = |name: &str| ["a", "b", "c"].contains(&name);
    write_folder(path, owned, |folder| {
        contents(of).iter().try_for_each(|(name, bytes)| {
            write_file(&folder.join(name), |sink| bytes.chunks(999).try_for_each(|part| sink.put(part)))
        })
    })
}

fn read(folder: &Path) -> Option<BTreeMap<String, Vec<u8>>> {
    let entries = std::fs::read_dir(folder).ok()?;
    let file = |entry: io::Result<std::fs::DirEntry>| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    Some(entries.map(file).collect())
}

fn leftovers(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().filter(|e| e.as_ref().unwrap().file_name() != "step").count()
}

/// A folder with or without an old one to replace, and its contents.
fn start(replacing: bool) -> (tempfile::TempDir, PathBuf, Option<BTreeMap<String, Vec<u8>>>) {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("step");
    if replacing {
        write(&path, "old").unwrap();
    }
    let before = read(&path);
    assert_eq!(before, replacing.then(|| contents("old")));
    (top, path, before)
}

#[test]
fn an_error_at_any_operation_leaves_the_old_or_the_new() {
    for (kind, replacing) in
        [Kind::Enospc, Kind::Eio, Kind::Short].into_iter().flat_map(|kind| [(kind, false), (kind, true)])
    {
        let mut number = 0;
        loop {
            number += 1;
            let (top, path, before) = start(replacing);
            let fault = inject(number, kind);
            let result = write(&path, "new");
            let fired = fault.fired();
            drop(fault);
            let (found, new) = (read(&path), Some(contents("new")));
            let case = format!("{kind:?} at operation {number}, replacing {replacing}: {result:?}");
            assert!(found == before || found == new, "{case}");
            if result.is_ok() {
                // after the new one is in place, only the removal of the old one can fail
                assert_eq!(found, new, "{case}");
                assert!(leftovers(top.path()) <= usize::from(fired), "{case}");
            } else {
                assert!(fired, "{case}");
                assert_eq!(leftovers(top.path()), 0, "{case}");
            }
            sweep(top.path()).unwrap();
            assert_eq!((read(&path), leftovers(top.path())), (found, 0), "{case}");
            if !fired {
                break;
            }
        }
        assert!(number > 20, "{number} operations in all");
    }
}

#[test]
fn an_error_leaves_the_old_file() {
    for kind in [Kind::Enospc, Kind::Eio, Kind::Short] {
        for number in 1.. {
            let top = tempfile::tempdir().unwrap();
            let path = top.path().join("a.bin");
            write_file(&path, |sink| sink.put(b"old")).unwrap();
            let fault = inject(number, kind);
            let written = write_file(&path, |sink| sink.put(&[7; 20_000]));
            let found = std::fs::read(&path).unwrap();
            assert!(found == b"old" || found == [7; 20_000], "{kind:?} at {number}");
            assert!(written.is_err() || found.len() == 20_000);
            assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 1, "{kind:?} at {number}");
            if !fault.fired() {
                break;
            }
        }
    }
}

/// An old folder that could neither be replaced nor put back stays complete under another name, and is put back later.
#[test]
fn a_folder_that_cannot_be_put_back_is_kept() {
    let (top, path, before) = start(true);
    let old = hidden(&path, "old").unwrap();
    std::fs::rename(&path, &old).unwrap();
    assert_eq!(sweep(top.path()).unwrap(), Swept { removed: 0, restored: vec![path.clone()] });
    assert_eq!(read(&path), before);
}

#[test]
fn file_systems_that_cannot_sync_a_folder_are_taken() {
    let top = tempfile::tempdir().unwrap();
    for kind in [Kind::Einval, Kind::Enosys] {
        let fault = inject(1, kind);
        fs::sync_folder(top.path()).unwrap();
        assert!(fault.fired());
    }
    for kind in [Kind::Eio, Kind::Enospc] {
        let _fault = inject(1, kind);
        assert!(fs::sync_folder(top.path()).is_err());
    }
    // only for a folder: it is an error if a file cannot be synced to the disk
    let _fault = inject(3, Kind::Einval);
    assert!(write_file(&top.path().join("a"), |sink| sink.put(b"x")).is_err());
}

/// Writes a folder when run in a child process; does nothing when run as a test.
#[test]
fn child_that_writes() {
    if let Some(folder) = std::env::var_os(CHILD_FOLDER) {
        write(Path::new(&folder), "new").unwrap();
    }
}

#[test]
fn a_death_at_any_operation_is_swept() {
    let this = std::env::current_exe().unwrap();
    let mut restored = 0;
    for replacing in [false, true] {
        let mut number = 0;
        loop {
            number += 1;
            let (top, path, before) = start(replacing);
            let mut child = Command::new(&this);
            child.args(["--exact", "format::atomic::fault_tests::child_that_writes", "--test-threads=1"]);
            child.env(VARIABLE, format!("{number}:abort")).env(CHILD_FOLDER, &path);
            let lived = child.output().unwrap().status.success();
            let (found, new) = (read(&path), Some(contents("new")));
            let case = format!("death at operation {number}, replacing {replacing}");
            // between the two renames the name does not exist
            assert!(found == before || found == new || found.is_none(), "{case}");
            let swept = sweep(top.path()).unwrap();
            restored += swept.restored.len();
            let after = read(&path);
            assert!(after == before || after == new, "{case}");
            assert_eq!(leftovers(top.path()), 0, "{case}");
            if lived {
                assert_eq!(after, new);
                break;
            }
        }
        assert!(number > 20, "{number} operations in all");
    }
    assert_eq!(restored, 1, "there is one moment at which the old folder must be put back");
}

#[test]
fn the_variable_is_understood() {
    assert!("enospc".parse::<Kind>() == Ok(Kind::Enospc) && "abort".parse::<Kind>() == Ok(Kind::Abort));
    let this = std::env::current_exe().unwrap();
    let top = tempfile::tempdir().unwrap();
    for (fault, said) in
        [("1:enospc", "StorageFull"), ("one", "expected N:KIND"), ("1:fire", "expected enospc")]
    {
        let mut child = Command::new(&this);
        child.args([
            "--exact",
            "format::atomic::fault_tests::child_that_writes",
            "--test-threads=1",
            "--nocapture",
        ]);
        child.env(VARIABLE, fault).env(CHILD_FOLDER, top.path().join("step"));
        let output = child.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(said), "{text}");
    }
}
