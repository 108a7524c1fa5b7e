//! The folders that libraries are searched in. Only absolute ones: nothing that depends on the folder a program happens to
//! be started in.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The value of an environment variable.
pub(super) type Variable<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The absolute ones of the folders that a variable names, separated like PATH. Relative ones are refused: what they mean
/// depends on the current folder, which may be anybody's.
pub(super) fn absolute_folders(variable: Variable<'_>, name: &'static str) -> Vec<PathBuf> {
    let Some(given) = variable(name) else { return Vec::new() };
    let all = std::env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty());
    let (absolute, relative): (Vec<_>, Vec<_>) = all.partition(|folder| folder.is_absolute());
    if let Some(folder) = relative.first() {
        note_relative(name, folder);
    }
    absolute
}

/// Says that a relative folder is not searched, once for each variable.
fn note_relative(name: &'static str, folder: &Path) {
    static NOTED: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    if !noted.contains(&name) {
        noted.push(name);
        let folder = folder.display();
        tracing::warn!(
            "{name} has the relative folder {folder}, which is not searched for libraries; make it absolute"
        );
    }
}

/// The folders to search, in order; `None` is the loader's own path. `pip_folders` are those below `site-packages`.
pub(super) fn folders(variable: Variable<'_>, pip_folders: &[&str]) -> Vec<Option<PathBuf>> {
    let mut all = vec![None];
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        for home in absolute_folders(variable, name).into_iter().take(1) {
            for below in ["lib64", "lib", "extras/CUPTI/lib64", "bin"] {
                all.push(Some(home.join(below)));
            }
        }
    }
    all.push(Some("/usr/local/cuda/lib64".into()));
    all.push(Some("/usr/local/cuda/extras/CUPTI/lib64".into()));
    for site in site_packages(variable) {
        all.extend(pip_folders.iter().map(|below| Some(site.join(below))));
    }
    all
}

/// Set by the Python package: the environment that it is in, which need not be the active one.
const PREFIX_VARIABLE: &str = "IRONHORSE_PYTHON_PREFIX";

/// The `site-packages` of the Python environment in use: the one we were imported in, the active one, then the one of the
/// `python3` on the path.
fn site_packages(variable: Variable<'_>) -> Vec<PathBuf> {
    let active = [PREFIX_VARIABLE, "VIRTUAL_ENV", "CONDA_PREFIX"];
    let mut roots: Vec<PathBuf> = active.iter().flat_map(|&name| absolute_folders(variable, name)).collect();
    if let Some(path) = variable("PATH") {
        let all = std::env::split_paths(&path).filter(|folder| folder.is_absolute()); // "." is common there
        let beside = all.filter(|folder| folder.join("python3").exists());
        roots.extend(beside.filter_map(|folder| folder.parent().map(Path::to_owned)));
    }
    let mut sites = Vec::new();
    for root in roots {
        let Ok(entries) = std::fs::read_dir(root.join("lib")) else { continue };
        for entry in entries.flatten() {
            let is_python = entry.file_name().to_string_lossy().starts_with("python3");
            let site = ["site-packages", "dist-packages"].map(|name| entry.path().join(name));
            sites.extend(site.into_iter().filter(|site| is_python && site.join("nvidia").is_dir()));
        }
    }
    sites.dedup();
    sites
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIP: [&str; 2] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];
    /// A variable that names folders of its own.
    const NAMED: &str = "SOME_PATH";

    /// An environment with NVIDIA's libraries, and the folder of one of them.
    fn environment(root: &Path) -> PathBuf {
        let folder = root.join("lib/python3.12/site-packages").join(PIP[0]);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn a_venv_in_the_current_folder_is_not_searched() {
        // Tests run in the folder of the crate; an environment below it is reached by relative paths only from there.
        let here = tempfile::tempdir_in(std::env::current_dir().unwrap()).unwrap();
        let relative = PathBuf::from(here.path().file_name().unwrap()).join(".venv");
        let absolute = environment(&here.path().join(".venv"));
        assert!(relative.is_dir(), "it is there, and only not looked at");
        std::fs::create_dir_all(relative.join("bin")).unwrap();
        std::fs::write(relative.join("bin/python3"), b"").unwrap();
        let searched = |name: &'static str, value: PathBuf| {
            let variable = move |asked: &str| (asked == name).then(|| value.clone().into_os_string());
            let mut all = absolute_folders(&variable, NAMED);
            all.extend(folders(&variable, &PIP).into_iter().flatten());
            assert!(all.iter().all(|folder| folder.is_absolute()), "{name}: {all:?}");
            all
        };
        let nothing = searched("", PathBuf::new());
        for name in [NAMED, "CUDA_HOME", "CUDA_PATH", PREFIX_VARIABLE, "VIRTUAL_ENV", "CONDA_PREFIX"] {
            assert_eq!(searched(name, relative.clone()), nothing, "{name}");
            assert_eq!(searched(name, PathBuf::new()), nothing, "{name}");
            assert!(searched(name, here.path().join(".venv")).len() > nothing.len(), "{name}");
        }
        assert_eq!(searched("PATH", relative.join("bin")), nothing);
        for (name, value) in [("VIRTUAL_ENV", ".venv"), (PREFIX_VARIABLE, ".venv"), ("PATH", ".venv/bin")] {
            assert!(searched(name, here.path().join(value)).contains(&absolute), "{name}");
        }
    }
}
