//! Finding shared libraries: an environment variable, the loader's path, CUDA_HOME, then the `nvidia/*` folders of the
//! Python environment.

use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// The variable that names folders to look in first, separated like PATH.
pub const PATH_VARIABLE: &str = "IRONHORSE_CUDA_PATH";

/// A library we can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Its name for people.
    pub name: &'static str,
    /// File names, best first.
    pub files: &'static [&'static str],
    /// The pip package that has it; empty for the driver.
    pub pip: &'static str,
    /// Folders below `site-packages` where that package puts it.
    pub pip_folders: &'static [&'static str],
    /// What it is needed for.
    pub purpose: &'static str,
}

/// The driver.
pub const DRIVER: Kind = Kind {
    name: "the NVIDIA driver",
    files: &["libcuda.so.1", "libcuda.so", "nvcuda.dll"],
    pip: "",
    pip_folders: &[],
    purpose: "any GPU work",
};
/// The run-time compiler.
pub const NVRTC: Kind = Kind {
    name: "NVRTC",
    files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    pip: "nvidia-cuda-nvrtc",
    pip_folders: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    purpose: "compiling our kernels",
};
/// Matrix products.
pub const CUBLASLT: Kind = Kind {
    name: "cuBLASLt",
    files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    pip: "nvidia-cublas",
    pip_folders: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
    purpose: "matrix products",
};
/// Attention.
pub const CUDNN: Kind = Kind {
    name: "cuDNN",
    files: &["libcudnn.so.9", "libcudnn.so"],
    pip: "nvidia-cudnn-cu13",
    pip_folders: &["nvidia/cudnn/lib"],
    purpose: "attention (our own kernels run without it)",
};
/// Kernel timings.
pub const CUPTI: Kind = Kind {
    name: "CUPTI",
    files: &["libcupti.so.13", "libcupti.so.12", "libcupti.so"],
    pip: "nvidia-cuda-cupti",
    pip_folders: &["nvidia/cu13/lib", "nvidia/cuda_cupti/lib"],
    purpose: "kernel timings in profile (events are used without it)",
};

/// Every library, in the order `doctor` shows them.
pub const ALL: [Kind; 5] = [DRIVER, NVRTC, CUBLASLT, CUDNN, CUPTI];

impl Kind {
    /// The command or package that brings the library.
    pub fn install(&self) -> String {
        if self.pip.is_empty() {
            return "install the driver from your distribution or nvidia.com, version 580 or newer".into();
        }
        format!(
            "install it with `pip install {}`, or set {PATH_VARIABLE} to the folder that has it",
            self.pip
        )
    }
}

/// A library that is open.
#[derive(Debug)]
pub struct Open {
    kind: Kind,
    library: libloading::Library,
    path: PathBuf,
}

impl Open {
    /// Looks everywhere and opens the first that loads.
    pub fn find(kind: Kind) -> Result<Self> {
        let folders = folders(&kind);
        let mut refused = String::new();
        for folder in &folders {
            for file in kind.files {
                let path = folder.as_ref().map_or_else(|| PathBuf::from(file), |folder| folder.join(file));
                if folder.is_some() && !path.exists() {
                    continue;
                }
                // SAFETY: NVIDIA's libraries have no load-time effects beyond their own state.
                match unsafe { open(&path) } {
                    Ok(library) => {
                        let path = real_path(&library, &path);
                        return Ok(Self { kind, library, path });
                    }
                    Err(error) if folder.is_some() => {
                        refused = format!("; {} does not load: {error}", path.display())
                    }
                    Err(_) => {}
                }
            }
        }
        let looked: Vec<String> = folders
            .iter()
            .map(|folder| {
                folder.as_ref().map_or("the loader's path".into(), |folder| folder.display().to_string())
            })
            .collect();
        Err(Error::LibraryMissing {
            library: kind.name,
            names: kind.files.join(", "),
            looked: looked.join(", ") + &refused,
            install: kind.install(),
        })
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has a function.
    pub fn has(&self, symbol: &'static str) -> bool {
        // SAFETY: the symbol is looked up, not used.
        unsafe { self.library.get::<*const ()>(symbol.as_bytes()) }.is_ok()
    }

    /// One of its functions.
    ///
    /// # Safety
    /// `F` is the function's true signature, and is not called after `self` is gone.
    pub unsafe fn symbol<F: Copy>(&self, symbol: &'static str) -> Result<F> {
        // SAFETY: by the contract.
        unsafe { self.library.get::<F>(symbol.as_bytes()) }.map(|found| *found).map_err(|_| {
            Error::SymbolMissing {
                library: self.kind.name,
                path: self.path.clone(),
                symbol,
                install: self.kind.install(),
            }
        })
    }
}

/// Where to look, in order; `None` is the loader's own path.
fn folders(kind: &Kind) -> Vec<Option<PathBuf>> {
    let mut all = Vec::new();
    if let Some(given) = std::env::var_os(PATH_VARIABLE) {
        all.extend(std::env::split_paths(&given).map(Some));
    }
    all.push(None);
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = std::env::var_os(variable).map(PathBuf::from) {
            for below in ["lib64", "lib", "extras/CUPTI/lib64", "bin"] {
                all.push(Some(home.join(below)));
            }
        }
    }
    all.push(Some("/usr/local/cuda/lib64".into()));
    all.push(Some("/usr/local/cuda/extras/CUPTI/lib64".into()));
    for site in site_packages() {
        all.extend(kind.pip_folders.iter().map(|below| Some(site.join(below))));
    }
    all
}

/// The `site-packages` of the Python environment in use: the active one, then the one of the `python3` on the path.
fn site_packages() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from).collect();
    roots.push(".venv".into());
    if let Some(path) = std::env::var_os("PATH") {
        let beside = std::env::split_paths(&path).filter(|folder| folder.join("python3").exists());
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

#[cfg(unix)]
unsafe fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // Global, because NVIDIA's libraries look for each other's symbols.
    // SAFETY: by the caller.
    unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }.map(Into::into)
}

#[cfg(not(unix))]
unsafe fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: by the caller.
    unsafe { libloading::Library::new(path) }
}

/// The file behind a bare name that the loader found: read from the process's own map.
fn real_path(_library: &libloading::Library, given: &Path) -> PathBuf {
    if given.is_absolute() || given.components().count() > 1 {
        return given.to_owned();
    }
    let name = given.to_string_lossy().into_owned();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let stem = name.split(".so").next().unwrap_or(&name);
    let found = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| {
        Path::new(path).file_name().is_some_and(|file| {
            let file = file.to_string_lossy();
            file.strip_prefix(stem).is_some_and(|rest| rest.starts_with(".so"))
        })
    });
    found.map_or_else(|| given.to_owned(), PathBuf::from)
}

/// Declares a struct of a library's functions, all looked up when it is loaded.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident of $kind:expr; $(fn $f:ident($($t:ty),* $(,)?) -> $r:ty;)*) => {
        $(#[$doc])*
        #[allow(non_snake_case, missing_docs, reason = "the library's own names")]
        #[derive(Debug)]
        pub struct $name {
            open: $crate::ffi::library::Open,
            $(pub $f: unsafe extern "C" fn($($t),*) -> $r,)*
        }

        #[allow(non_snake_case)]
        impl $name {
            /// Finds the library and all functions we call.
            pub fn load() -> $crate::Result<Self> {
                let open = $crate::ffi::library::Open::find($kind)?;
                // SAFETY: the signatures are those of the library's headers; `open` is kept beside them.
                unsafe {
                    $(let $f = open.symbol(stringify!($f))?;)*
                    Ok(Self { open, $($f,)* })
                }
            }

            /// Where it was found.
            pub fn path(&self) -> &std::path::Path {
                self.open.path()
            }
        }
    };
}
pub(crate) use functions;
