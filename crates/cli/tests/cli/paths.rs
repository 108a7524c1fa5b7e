//! Paths that are not UTF-8, which Linux allows.
#![cfg(target_os = "linux")]

use super::Place;
use super::place::{Done, TINY};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

fn name(bytes: &[u8]) -> OsString {
    OsStr::from_bytes(bytes).to_owned()
}

#[test]
fn folders_and_files_need_not_be_utf8() {
    let place = Place::new();
    let (run, json) = (name(b"run\xff"), name(b"summary\xfe.json"));
    let done: Done = place.command(&format!("train {TINY}")).arg("--out").arg(&run).output().unwrap().into();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let done: Done = place.command("plan").arg("--json").arg(&json).output().unwrap().into();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let top = place.path("");
    assert!(top.join(&json).is_file() && top.join(&run).join("config.toml").is_file());
    // only these two: a name that was mangled would be a third
    assert_eq!(std::fs::read_dir(&top).unwrap().count(), 2);

    let model = top.join(&run);
    let mut command = place.command("generate --tokens 3");
    let done: Done = command.arg("--model").arg(&model).output().unwrap().into();
    assert_eq!(done.code, Some(0), "{}", done.stderr);

    let mut config = OsString::from("--config=");
    config.push(top.join(&run).join("config.toml"));
    let done: Done = place.command("train --out again").arg(config).output().unwrap().into();
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(place.path("again/config.toml").is_file());
}
