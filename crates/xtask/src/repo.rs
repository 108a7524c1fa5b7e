//! The locations of the repository, cargo, the Python environment and the built binary.

use crate::process::{output_of, run};
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A cargo profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Optimised, with the checks of a debug build; shares artifacts with `cargo test`.
    Dev,
    /// The profile of releases.
    Release,
}

impl Profile {
    /// The name that cargo knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dev => "dev",
            Self::Release => "release",
        }
    }

    fn folder(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }
}

/// The variable of cargo that names what compiles the packages of the workspace.
const WRAPPER: &str = "RUSTC_WORKSPACE_WRAPPER";
/// Clippy's driver, by the name that .cargo/config.toml has too: under another name cargo would compile again.
const CLIPPY: &str = "clippy-driver";

/// What compiles the packages of the workspace; dependencies are always compiled by rustc. Cargo keeps what the two make
/// apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// Clippy's driver: rustc that lints too. It compiles unoptimised MIR, and without the checks of a debug build for
    /// null and misaligned pointers.
    Clippy,
    /// rustc, as users compile.
    Rustc,
}

impl std::fmt::Display for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Clippy => "with clippy's lints",
            Self::Rustc => "rustc",
        })
    }
}

impl Compiler {
    /// Tells cargo, also one that the command starts.
    pub fn set(self, command: &mut Command) {
        match self {
            Self::Clippy => command.env(WRAPPER, CLIPPY),
            Self::Rustc => command.env_remove(WRAPPER),
        };
    }
}

/// The checkout this command works on.
pub struct Repo {
    root: PathBuf,
    program: PathBuf,
}

impl Repo {
    /// The repository that contains the package cargo runs, or the current folder.
    pub fn find() -> Result<Self> {
        let given = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let start = given.map_or_else(std::env::current_dir, Ok).context("there is no current folder")?;
        match start.ancestors().find(|folder| folder.join("crates/xtask/Cargo.toml").is_file()) {
            Some(root) => {
                // Asked once, at the start: a build of the workspace replaces this program's file.
                let program = std::env::current_exe().context("cannot find this program's own file")?;
                Ok(Self { root: root.to_owned(), program })
            }
            None => bail!("{} is not inside a checkout of ironhorse", start.display()),
        }
    }

    /// The root of the repository.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A command that runs this program again.
    pub fn xtask(&self) -> Command {
        Command::new(&self.program)
    }

    /// A command of git, in the root.
    pub fn git(&self) -> Command {
        let mut git = Command::new("git");
        git.current_dir(&self.root);
        git
    }

    /// A command of the cargo that runs this program, in the root.
    pub fn cargo(&self) -> Command {
        self.outside_cargo(Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())))
    }

    /// The command, in the root, without the variables by which cargo tells this program which package it is of. Some build
    /// scripts run again when they change: a cargo that inherits them, also one that pip starts, would compile the same
    /// crates in turns with one that does not.
    fn outside_cargo(&self, mut command: Command) -> Command {
        let is_of_package = |name: &std::ffi::OsString| {
            name.to_str()
                .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
        };
        let names = std::env::vars_os().map(|(name, _)| name).filter(is_of_package);
        names.for_each(|name| _ = command.env_remove(name));
        command.current_dir(&self.root);
        command
    }

    /// As [`Self::cargo`], with this compiler.
    pub fn cargo_with(&self, compiler: Compiler) -> Command {
        let mut cargo = self.cargo();
        compiler.set(&mut cargo);
        cargo
    }

    /// Builds packages in the release profile.
    pub fn build_release(&self, packages: &[&str]) -> Result<()> {
        let mut cargo = self.cargo();
        // Like maturin: without linking libpython, so that any Python from 3.10 on can load the native module.
        cargo.env("PYO3_BUILD_EXTENSION_MODULE", "1");
        cargo.args(["build", "--release"]).args(packages.iter().flat_map(|name| ["--package", name]));
        ensure!(run(&mut cargo)?, "the release build failed (cargo's messages are above)");
        Ok(())
    }

    /// The folder of the Python environment.
    pub fn venv(&self) -> PathBuf {
        self.root.join(".venv")
    }

    /// Fails if there is no Python environment.
    pub fn ensure_venv(&self) -> Result<()> {
        ensure!(python_of(&self.venv()).exists(), "there is no .venv yet: cargo xtask setup");
        Ok(())
    }

    /// A command of the environment's Python, in the root. What it imports is compiled once and kept in the environment,
    /// even where variables say otherwise: pip leaves compiling to the first import, and the tests start Python often.
    pub fn python(&self) -> Command {
        let mut python = self.outside_cargo(Command::new(python_of(&self.venv())));
        python.env_remove("PYTHONDONTWRITEBYTECODE").env("PYTHONPYCACHEPREFIX", self.venv().join("pycache"));
        python
    }

    /// The folders in which the environment keeps its packages.
    pub fn site_packages(&self) -> Vec<PathBuf> {
        let venv = self.venv();
        let versions = std::fs::read_dir(venv.join("lib")).into_iter().flatten().flatten();
        let mut sites = vec![venv.join("Lib/site-packages")]; // Windows
        sites.extend(versions.map(|version| version.path().join("site-packages")));
        sites.retain(|site| site.is_dir());
        sites
    }

    /// The target folder of cargo.
    pub fn target(&self) -> Result<PathBuf> {
        let metadata = output_of(self.cargo().args(["metadata", "--no-deps", "--format-version", "1"]));
        let folder = metadata.as_deref().and_then(target_folder);
        folder.context("`cargo metadata` does not say where the target folder is")
    }

    /// The path of the `ironhorse` binary built in this profile.
    pub fn binary(&self, profile: Profile) -> Result<PathBuf> {
        let name = format!("ironhorse{}", std::env::consts::EXE_SUFFIX);
        Ok(self.target()?.join(profile.folder()).join(name))
    }
}

/// The interpreter of a virtual environment.
pub fn python_of(venv: &Path) -> PathBuf {
    venv.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" })
}

/// The value of `target_directory` in cargo's JSON.
fn target_folder(metadata: &str) -> Option<PathBuf> {
    let (_, rest) = metadata.split_once("\"target_directory\":\"")?;
    let mut path = String::new();
    let mut chars = rest.chars();
    loop {
        match chars.next()? {
            '"' => return Some(path.into()),
            '\\' => path.push(chars.next()?), // a path has only \\ and \" to escape
            c => path.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The packages, with their features, that cargo would build.
    fn features(repo: &Repo, packages: &[&str]) -> BTreeSet<String> {
        let mut tree = repo.cargo();
        tree.args(["tree", "--offline", "--locked", "--prefix=none", "--format={p} {f}"]).args(packages);
        let text = output_of(&mut tree).unwrap();
        text.lines().map(|line| line.trim_end_matches(" (*)").to_owned()).collect()
    }

    #[test]
    fn the_features_are_those_of_the_workspace() {
        let repo = Repo::find().unwrap();
        let all = features(&repo, &["--workspace", "--edges=normal,build,dev"]);
        for package in ["ironhorse-xtask", "ironhorse-py"] {
            let own = features(&repo, &["--package", package, "--edges=normal,build"]);
            let others: Vec<&String> = own.difference(&all).collect();
            assert!(
                others.is_empty(),
                "{package} has other features than the workspace: all is compiled twice: {others:?}"
            );
        }
    }

    #[test]
    fn nobody_inherits_which_package_this_is() {
        let repo = Repo::find().unwrap();
        assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "cargo and cargo xtask test set it");
        for command in [repo.cargo(), repo.python()] {
            let removed = |name: &str| command.get_envs().any(|(one, value)| one == name && value.is_none());
            assert!(removed("CARGO_MANIFEST_DIR"), "{command:?}");
        }
    }

    #[test]
    fn this_program_is_compiled_as_the_checks_are() {
        let config =
            std::fs::read_to_string(Repo::find().unwrap().root().join(".cargo/config.toml")).unwrap();
        assert!(config.contains(&format!("build.rustc-workspace-wrapper='{CLIPPY}'")), "{config}");
    }

    #[test]
    fn the_target_folder_is_read_from_json() {
        let json = r#"{"packages":[],"target_directory":"a\\b \"c\"/d","version":1}"#;
        assert_eq!(target_folder(json), Some(PathBuf::from("a\\b \"c\"/d")));
        assert_eq!(target_folder("{}"), None);
        assert_eq!(target_folder(r#""target_directory":"cut"#), None);
    }

    #[test]
    fn the_repository_is_found() {
        let repo = Repo::find().unwrap();
        assert!(repo.root().join("rust-toolchain.toml").is_file());
        assert!(repo.binary(Profile::Release).unwrap().ends_with("release/ironhorse"));
    }
}
