//! Builds the C examples with gcc against both libraries and runs them, and runs the Python example with ctypes.
//!
//! Skipped with a message if there is no gcc or no python3.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn exists(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("no {tool}: left out");
    }
    found
}

#[track_caller]
fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{command:?}: {}\n{}{}", output.status, texts[0], texts[1]);
    output
}

/// Builds the libraries in the profile of the tests and returns their folder. The whole workspace is named because cargo
/// chooses the features of dependencies for what it is asked to build: for one package alone it would compile all anew.
fn libraries() -> PathBuf {
    // target/debug/deps/programs-...: cargo puts the libraries two folders up.
    let test = std::env::current_exe().unwrap();
    let (folder, target) = (test.ancestors().nth(2).unwrap(), test.ancestors().nth(3).unwrap());
    let profile = if folder.ends_with("release") { "release" } else { "test" };
    let mut cargo = Command::new(env!("CARGO"));
    // as `cargo xtask` calls it: build scripts that look at these would run again, and all that needs them with it
    let of_package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| of_package(name)).for_each(|name| _ = cargo.env_remove(name));
    let args = ["build", "--quiet", "--workspace", "--lib", "--profile", profile, "--target-dir"];
    succeed(cargo.args(args).arg(target).current_dir(root()));
    folder.to_owned()
}

#[test]
fn examples_run() {
    let (libraries, examples) = (libraries(), root().join("examples/c"));
    let mut sources: Vec<PathBuf> = std::fs::read_dir(&examples)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "c"))
        .collect();
    sources.sort();
    assert!(sources.len() >= 3);
    let out = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    for source in sources.iter().filter(|_| exists("gcc")) {
        let name = source.file_stem().unwrap().to_str().unwrap();
        for kind in ["so", "a"] {
            let program = out.join(format!("{name}-{kind}"));
            let mut gcc = Command::new("gcc");
            gcc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-I"]);
            gcc.arg(root().join("crates/capi/include")).arg(source).arg("-o").arg(&program);
            gcc.arg(libraries.join(format!("libironhorse.{kind}"))).args(["-lpthread", "-ldl", "-lm"]);
            succeed(&mut gcc);
            let output = succeed(Command::new(&program).env("LD_LIBRARY_PATH", &libraries));
            assert!(String::from_utf8_lossy(&output.stdout).ends_with("ok\n"), "{name} with the .{kind}");
        }
    }
    if exists("python3") {
        let demo = examples.join("ctypes_demo.py");
        let output = succeed(Command::new("python3").arg(demo).arg(libraries.join("libironhorse.so")));
        assert!(String::from_utf8_lossy(&output.stdout).ends_with("ok\n"));
    }
}
