//! Tests of the writers without faults; [`super::fault_tests`] has those with.

use std::fs;

use super::*;

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    write_file(&path, |sink| sink.put(b"old")).unwrap();
    let failed: Result<()> = write_file(&path, |sink| {
        sink.put(b"half of the new")?;
        Err(Error::Unsupported("no more".into()))
    });
    assert!(failed.is_err());
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(names(folder.path()), ["a.bin"]);
    write_file(&path, |sink| sink.put(b"new")).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(names(folder.path()), ["a.bin"]);
}

#[test]
fn impossible_targets_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let text = write_file(folder.path(), |_| Ok(())).unwrap_err().to_string();
    assert!(text.ends_with("path is a folder, expected a file"), "{text}");
    let text = write_file(&folder.path().join("no/such/a.bin"), |_| Ok(())).unwrap_err().to_string();
    assert!(text.contains("no/such/a.bin: cannot create:"), "{text}");
    assert!(write_file(Path::new("/"), |_| Ok(())).is_err());
    assert!(write_file(Path::new(""), |_| Ok(())).is_err());
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_device_is_named() {
    let path = Path::new("/dev/full");
    if path.exists() {
        let text = write_file(path, |sink| sink.put(b"text")).unwrap_err().to_string();
        assert!(text.starts_with("/dev/full: cannot write: "), "{text}");
        assert!(path.exists());
    }
}

#[cfg(unix)]
#[test]
fn a_link_stays_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    fs::write(&file, "old").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    write_file(&link, |sink| sink.put(b"new")).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read(&file).unwrap(), b"new");
}

#[test]
fn a_folder_is_replaced_whole_or_not_at_all() {
    let top = tempfile::tempdir().unwrap();
    let path = top.path().join("step");
    let fill =
        |text: &'static str| move |folder: &Path| write_file(&folder.join("a"), |s| s.put(text.as_bytes()));
    write_folder(&path, |name| name == "a", fill("one")).unwrap();
    write_folder(&path, |name| name == "a", fill("two")).unwrap();
    assert_eq!(fs::read(path.join("a")).unwrap(), b"two");
    let failed: Result<()> = write_folder(
        &path,
        |name| name == "a",
        |folder| {
            write_file(&folder.join("a"), |s| s.put(b"three"))?;
            Err(Error::field(&folder.join("a"), "field", 1, 2))
        },
    );
    assert_eq!(
        failed.unwrap_err().to_string(),
        format!("{}: field is 1, expected 2", path.join("a").display())
    );
    assert_eq!(fs::read(path.join("a")).unwrap(), b"two");
    assert_eq!(names(top.path()), ["step"]);
}

#[test]
fn a_folder_with_other_files_is_not_replaced() {
    let top = tempfile::tempdir().unwrap();
    fs::write(top.path().join("thesis.tex"), "precious").unwrap();
    let text = write_folder(top.path(), |name| name == "a", |_| Ok(())).unwrap_err().to_string();
    assert!(text.contains("thesis.tex"), "{text}");
    assert_eq!(names(top.path()), ["thesis.tex"]);
}

#[test]
fn a_name_that_is_taken_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (theirs, ours) = (folder.path().join(".a.tmp-1"), folder.path().join(".a.tmp-2"));
    fs::write(&theirs, "another writer's").unwrap();
    let mut names_to_try = [theirs.clone(), ours.clone()].into_iter();
    let path = folder.path().join("a");
    let name = || Ok(names_to_try.next().unwrap());
    let (temporary, file) = Temporary::create_under(name, &path, OutFile::create_new).unwrap();
    assert_eq!(temporary.path, ours);
    drop((file, temporary));
    assert_eq!(names(folder.path()), [".a.tmp-1"]);
    let failed = Temporary::create_under(|| Ok(theirs.clone()), &path, super::fs::create_dir);
    assert!(failed.err().unwrap().to_string().contains("/a: cannot create:"));
    assert_eq!(fs::read(&theirs).unwrap(), b"another writer's");
}

#[test]
fn names_are_random() {
    let names: std::collections::HashSet<_> =
        (0..100).map(|_| hidden(Path::new("x/a.bin"), "tmp").unwrap()).collect();
    assert_eq!(names.len(), 100);
    assert!(names.iter().all(|name| name.to_str().unwrap().len() == "x/.a.bin.tmp-".len() + 32));
}

#[cfg(target_os = "linux")]
#[test]
fn names_need_not_be_utf8() {
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let name = |bytes: &[u8]| folder.path().join(std::ffi::OsStr::from_bytes(bytes));
    let (file, step) = (name(b"a\xff.bin"), name(b"step\xfe"));
    write_file(&file, |sink| sink.put(b"x")).unwrap();
    for _ in 0..2 {
        write_folder(&step, |name| name == "a", |folder| write_file(&folder.join("a"), |s| s.put(b"y")))
            .unwrap();
    }
    fs::rename(&step, hidden(&step, "old").unwrap()).unwrap();
    fs::write(hidden(&file, "tmp").unwrap(), "half").unwrap();
    let swept = sweep(folder.path()).unwrap();
    assert_eq!((swept.removed, swept.restored), (1, vec![step.clone()]));
    assert_eq!((fs::read(&file).unwrap(), fs::read(step.join("a")).unwrap()), (b"x".to_vec(), b"y".to_vec()));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
}

#[test]
fn sweep_removes_only_what_writers_leave() {
    let top = tempfile::tempdir().unwrap();
    let at = |name: &str| top.path().join(name);
    let random = "0123456789abcdef0123456789abcdef";
    for name in ["a", ".a.tmp", ".a.tmp-1-2", ".tmp-x", "notes.tmp-1", ".bashrc"] {
        fs::write(at(name), "kept").unwrap();
    }
    fs::write(at(&format!(".a.tmp-{random}")), "half").unwrap();
    // a name that no writer makes: upper case, or without a target's name
    fs::write(at(&format!(".a.tmp-{}", random.to_uppercase())), "kept").unwrap();
    fs::write(at(&format!("..tmp-{random}")), "kept").unwrap();
    for folder in [format!(".b.tmp-{random}"), format!(".c.old-{random}"), "c".into()] {
        fs::create_dir(at(&folder)).unwrap();
        fs::write(at(&folder).join("x"), &folder).unwrap();
    }
    let swept = sweep(top.path()).unwrap();
    assert_eq!((swept.removed, swept.restored.len()), (3, 0));
    assert_eq!(fs::read(at("c").join("x")).unwrap(), b"c", "the newer one is there, the old one goes");
    assert_eq!(fs::read_dir(top.path()).unwrap().count(), 9);
    assert_eq!(sweep(&at("no such folder")).unwrap().removed, 0);
}

#[test]
fn sweep_puts_the_latest_old_folder_back() {
    let top = tempfile::tempdir().unwrap();
    for text in ["one", "two"] {
        let old = top.path().join(format!(".step.old-{:032x}", text.len() + text.as_bytes()[0] as usize));
        fs::create_dir(&old).unwrap();
        fs::write(old.join("a"), text).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let swept = sweep(top.path()).unwrap();
    let step = top.path().join("step");
    assert_eq!((swept.removed, swept.restored), (1, vec![step.clone()]));
    assert_eq!(
        (names(top.path()), fs::read(step.join("a")).unwrap()),
        (vec!["step".into()], b"two".to_vec())
    );
}
