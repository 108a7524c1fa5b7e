//! Puts the commit into the binary, for benchmark records: `-dirty` where the sources are not those of the commit.

use std::path::Path;
use std::process::Command;

fn main() {
    let git = |args: &[&str]| {
        // without optional locks git does not touch the index, so looking does not cause a rebuild
        let output = Command::new("git").env("GIT_OPTIONAL_LOCKS", "0").args(args).output().ok();
        let output = output.filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok().map(|text| text.trim().to_owned())
    };
    let describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"];
    let commit = git(&describe).unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=IRONHORSE_COMMIT={commit}");

    // A commit or a checkout moves HEAD or the branch, an edit changes the sources. A path that does not exist would
    // cause a rebuild every time; in a worktree HEAD and branches lie in different folders, which `--git-path` knows.
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    let moved = ["HEAD", "logs/HEAD", "packed-refs"].into_iter().chain(branch.as_deref());
    let moved = moved.filter_map(|name| git(&["rev-parse", "--git-path", name]));
    let sources = ["..", "../../Cargo.toml", "../../Cargo.lock"].map(String::from);
    for path in moved.chain(sources).filter(|path| Path::new(path).exists()) {
        println!("cargo::rerun-if-changed={path}");
    }
}
