//! What `cargo xtask test --quick` compiles: it must not take longer than the patience of the inner loop.

use crate::process::output_of;
use crate::repo::Repo;
use std::collections::BTreeSet;

/// Crates without unit tests; `--lib` would compile them all the same.
const WITHOUT_TESTS: [&str; 2] = ["capi", "py"];
/// Crates whose unit tests compile or run for a minute: they wait for a change in the crate.
const ONLY_IF_CHANGED: [&str; 4] = ["cpu", "testkit", "text", "train"];

/// The commands of cargo that compile the binary and the unit tests for what has changed. Both leave out the same optional
/// features of dependencies, so that they share what they compile.
pub fn quick(repo: &Repo) -> [Vec<String>; 2] {
    let changed = crates(|args| output_of(repo.git().args(args)));
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let mut tests = words("test --no-run --workspace --lib --bin ironhorse-xtask");
    for name in left_out(changed.as_ref()) {
        tests.extend(["--exclude".into(), format!("ironhorse-{name}")]);
    }
    [words("build --workspace --exclude ironhorse-py --bin ironhorse"), tests]
}

/// The crates whose unit tests are left out; where it is not known what has changed, only those without any.
fn left_out(changed: Option<&BTreeSet<String>>) -> Vec<&'static str> {
    let waits = |name: &&str| changed.is_some_and(|changed| !changed.contains(*name));
    WITHOUT_TESTS.into_iter().chain(ONLY_IF_CHANGED.into_iter().filter(waits)).collect()
}

/// The folders below `crates/` with files that differ from the last commit; where there is no such file, those that the last
/// commit changed. `None` without git.
fn crates(git: impl Fn(&[&str]) -> Option<String>) -> Option<BTreeSet<String>> {
    let edited = git(&["diff", "--name-only", "--relative", "HEAD", "--", "crates"])?;
    let new = git(&["ls-files", "--others", "--exclude-standard", "--", "crates"])?;
    let mut files = edited + "\n" + &new;
    if files.trim().is_empty() {
        files = git(&["diff", "--name-only", "--relative", "HEAD~1", "HEAD", "--", "crates"])?;
    }
    let folder = |file: &str| Some(file.strip_prefix("crates/")?.split_once('/')?.0.to_owned());
    Some(files.lines().filter_map(folder).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository with these edited and new files, and these in the last commit.
    fn changed(edited: &str, new: &str, last: Option<&str>) -> Option<Vec<String>> {
        let answer = |args: &[&str]| match args {
            ["ls-files", ..] => Some(new.to_owned()),
            _ if args.contains(&"HEAD~1") => last.map(str::to_owned),
            _ => Some(edited.to_owned()),
        };
        crates(answer).map(|found| found.into_iter().collect())
    }

    #[test]
    fn what_has_changed_is_in_its_crate() {
        let found =
            changed("crates/core/src/op/norm.rs\ncrates/core/Cargo.toml\n", "crates/text/new.rs\n", None);
        assert_eq!(found.unwrap(), ["core", "text"]);
        assert_eq!(changed("", "", Some("crates/train/src/lib.rs\n")).unwrap(), ["train"]);
        assert!(changed("", "", Some("")).unwrap().is_empty());
        assert_eq!(changed("", "", None), None, "the first commit has none before it");
        assert_eq!(crates(|_| None), None);
    }

    #[test]
    fn tests_that_take_long_wait_for_a_change() {
        let of = |names: &[&str]| left_out(Some(&names.iter().map(|name| (*name).to_owned()).collect()));
        assert_eq!(of(&["core"]), ["capi", "py", "cpu", "testkit", "text", "train"]);
        assert_eq!(of(&["cpu", "train", "cli"]), ["capi", "py", "testkit", "text"]);
        assert_eq!(left_out(None), ["capi", "py"]);
        let folder = Repo::find().unwrap().root().join("crates");
        assert!(left_out(None).iter().chain(&of(&[])).all(|name| folder.join(name).is_dir()));
    }
}
