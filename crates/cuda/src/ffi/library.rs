//! Finding shared libraries: an environment variable, the loader's path, CUDA_HOME, then the `nvidia/*` folders of the
//! Python environment. Loading a library runs its code, so only absolute places are searched: nothing that depends on the
//! folder a program happens to be started in.

use super::search::{Variable, absolute_folders, folders};
use crate::{Error, Result};
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The variable that names folders to look in first, separated like PATH.
pub const PATH_VARIABLE: &str = "IRONHORSE_CUDA_PATH";

/// A library we can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Its name in messages.
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

macro_rules! kinds {
    ($($(#[$doc:meta])* $id:ident = $name:literal for $purpose:literal: $files:expr, pip $pip:literal in $folders:expr;)*) => {
        $($(#[$doc])* pub const $id: Kind =
            Kind { name: $name, files: &$files, pip: $pip, pip_folders: &$folders, purpose: $purpose };)*
    };
}

kinds! {
    /// The driver.
    DRIVER = "the NVIDIA driver" for "any GPU work":
        ["libcuda.so.1", "libcuda.so", "nvcuda.dll"], pip "" in [];
    /// The run-time compiler.
    NVRTC = "NVRTC" for "compiling our kernels":
        ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        pip "nvidia-cuda-nvrtc" in ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"];
    /// The library of matrix products.
    CUBLASLT = "cuBLASLt" for "matrix products":
        ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        pip "nvidia-cublas" in ["nvidia/cu13/lib", "nvidia/cublas/lib"];
    /// The library of attention.
    CUDNN = "cuDNN" for "attention (our own kernels run without it)":
        ["libcudnn.so.9", "libcudnn.so"], pip "nvidia-cudnn-cu13" in ["nvidia/cudnn/lib"];
    /// The library of kernel timings.
    CUPTI = "CUPTI" for "kernel timings in profile (events are used without it)":
        ["libcupti.so.13", "libcupti.so.12", "libcupti.so"],
        pip "nvidia-cuda-cupti" in ["nvidia/cu13/lib", "nvidia/cuda_cupti/lib"];
    /// The library of messages between GPUs.
    NCCL = "NCCL" for "several GPUs (one needs none)":
        ["libnccl.so.2", "libnccl.so"], pip "nvidia-nccl-cu13" in ["nvidia/nccl/lib", "nvidia/cu13/lib"];
}

/// Every library, in the order `doctor` shows them.
pub const ALL: [Kind; 6] = [DRIVER, NVRTC, CUBLASLT, CUDNN, CUPTI, NCCL];

impl Kind {
    /// The command or package that brings the library.
    pub fn install(&self) -> String {
        if self.pip.is_empty() {
            return "install the driver from your distribution or nvidia.com, version 525 or newer (580 for CUDA 13)"
                .into();
        }
        let package = self.package(driver_major());
        format!("install it with `pip install {package}`, or set {PATH_VARIABLE} to the folder that has it")
    }

    /// The pip package for a driver of this major version; those of CUDA 12 are marked, most of CUDA 13 are not.
    fn package(&self, major: Option<u32>) -> String {
        match release(major) {
            Some(12) => format!("{}-cu12", self.pip.trim_end_matches("-cu13")),
            _ => self.pip.into(),
        }
    }

    /// Every folder (`None`: the loader's own path) with every file name to try there, best first. The folders that the
    /// user named come before all others, then files of the driver's release wherever they are: code made by a newer
    /// one does not load.
    fn places(&self, major: Option<u32>, named: &[PathBuf], others: &[Option<PathBuf>]) -> Vec<Place> {
        let wanted = release(major);
        let other_release = |file: &str| {
            [12, 13].iter().any(|&other| wanted.is_some_and(|wanted| wanted != other) && is_of(file, other))
        };
        let named = named.iter().map(|folder| (0, Some(folder.clone())));
        let others = others.iter().map(|folder| (1, folder.clone()));
        let mut all: Vec<(u32, bool, Place)> = Vec::new();
        for (at, (rank, folder)) in named.chain(others).enumerate() {
            for &file in self.files {
                let rank = if rank == 0 { at as u32 } else { u32::MAX };
                all.push((rank, other_release(file), (folder.clone(), file)));
            }
        }
        all.sort_by_key(|&(rank, other, _)| (rank, other)); // stable: folders and names stay in order otherwise
        all.into_iter().map(|(_, _, place)| place).collect()
    }
}

/// A folder, or `None` for the loader's own path, and a file name.
type Place = (Option<PathBuf>, &'static str);

fn is_of(file: &str, release: u32) -> bool {
    file.ends_with(&format!(".so.{release}"))
}

/// The CUDA release, 12 or 13, whose libraries fit the driver; `None` if the driver is not known.
fn release(driver_major: Option<u32>) -> Option<u32> {
    driver_major.map(|major| major.clamp(12, 13))
}

/// The CUDA version of this machine's driver, without its minor part.
fn driver_major() -> Option<u32> {
    static MAJOR: OnceLock<Option<u32>> = OnceLock::new();
    *MAJOR.get_or_init(|| {
        let driver = Open::find(DRIVER).ok()?;
        let mut version: c_int = 0;
        // SAFETY: the signature is that of the driver's header; it may be called before the driver is started.
        let status = unsafe {
            let get = driver.symbol::<unsafe extern "C" fn(*mut c_int) -> u32>("cuDriverGetVersion").ok()?;
            get(&mut version)
        };
        (status == 0).then_some(version / 1000).and_then(|major| u32::try_from(major).ok())
    })
}

/// A library that is open.
#[derive(Debug)]
pub struct Open {
    kind: Kind,
    library: libloading::Library,
    path: PathBuf,
}

impl Open {
    /// Looks everywhere and opens the first that loads. A cuDNN that the process has already, such as PyTorch's, is used
    /// whatever else there is: its parts find each other by name, so that those of two copies would be mixed.
    pub fn find(kind: Kind) -> Result<Self> {
        if kind == CUDNN
            && let Some((library, file)) = loaded(kind)
        {
            return Ok(Self { kind, library, path: real_path(Path::new(file)) });
        }
        let variable: Variable<'_> = &|name| std::env::var_os(name);
        let (named, others) =
            (absolute_folders(variable, PATH_VARIABLE), folders(variable, kind.pip_folders));
        let major = if kind == DRIVER { None } else { driver_major() };
        let mut refused = String::new();
        for (folder, file) in kind.places(major, &named, &others) {
            let path = folder.as_ref().map_or_else(|| PathBuf::from(file), |folder| folder.join(file));
            if folder.is_some() && !path.exists() {
                continue;
            }
            // SAFETY: NVIDIA's libraries have no load-time effects beyond their own state.
            match unsafe { open(&path) } {
                Ok(library) => {
                    return Ok(Self { kind, library, path: real_path(&path) });
                }
                Err(error) if folder.is_some() => {
                    refused = format!("; {} does not load: {error}", path.display())
                }
                Err(_) => {}
            }
        }
        let name = |folder: &Path| folder.display().to_string();
        let mut looked: Vec<String> = named.iter().map(|folder| name(folder)).collect();
        looked.extend(others.iter().map(|f| f.as_deref().map_or("the loader's path".into(), name)));
        Err(Error::LibraryMissing {
            library: kind.name,
            names: kind.files.join(", "),
            looked: looked.join(", ") + &refused,
            install: kind.install(),
        })
    }

    /// The file that it was found in.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// One of its functions.
    ///
    /// # Safety
    /// `F` is the function's true signature, and is not called after `self` is gone.
    pub unsafe fn symbol<F: Copy>(&self, symbol: &'static str) -> Result<F> {
        // SAFETY: the caller guarantees that `F` is the signature of this function.
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

/// Whether this process has the library already, whoever loaded it. Not asked on Windows: loading a driver that is there costs
/// little.
pub(crate) fn is_loaded(kind: Kind) -> bool {
    cfg!(not(unix)) || loaded(kind).is_some()
}

/// The library and its file's name, if this process has it already.
#[cfg(unix)]
fn loaded(kind: Kind) -> Option<(libloading::Library, &'static str)> {
    /// `RTLD_NOLOAD`: says whether it is there, and loads nothing.
    const NO_LOAD: c_int = if cfg!(target_os = "macos") { 0x10 } else { 0x4 };
    use libloading::os::unix::{Library, RTLD_LAZY};
    kind.files.iter().find_map(|&file| {
        // SAFETY: nothing is loaded, so no initialiser runs.
        let library = unsafe { Library::open(Some(file), RTLD_LAZY | NO_LOAD) }.ok()?;
        Some((library.into(), file))
    })
}

#[cfg(not(unix))]
fn loaded(_kind: Kind) -> Option<(libloading::Library, &'static str)> {
    None
}

#[cfg(unix)]
unsafe fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    /// `RTLD_NODELETE`: closing does not unload.
    const KEPT: c_int = if cfg!(target_os = "macos") { 0x80 } else { 0x1000 };
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // Global, because NVIDIA's libraries look for each other's symbols. Kept, because what they have a thread do at its end
    // stays behind when they are unloaded: the thread would jump to where they were.
    // SAFETY: the caller guarantees that the initialisers of the library may run.
    unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL | KEPT) }.map(Into::into)
}

#[cfg(not(unix))]
unsafe fn open(path: &Path) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: the caller guarantees that the initialisers of the library may run.
    unsafe { libloading::Library::new(path) }
}

/// The file behind a bare name that the loader found: read from the process's own map.
fn real_path(given: &Path) -> PathBuf {
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

/// Turns a status into a result: 0 is success.
pub(super) fn check(library: &'static str, call: &'static str, status: i64, detail: &str) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(Error::Library { library, call, status, detail: detail.into() }),
    }
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

            /// The file that it was found in.
            pub fn path(&self) -> &std::path::Path {
                self.open.path()
            }
        }
    };
}
pub(crate) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    fn places(major: Option<u32>) -> Vec<String> {
        let (named, others) = ([PathBuf::from("named")], [None, Some(PathBuf::from("pip"))]);
        let name = |(folder, file): Place| folder.unwrap_or("-".into()).join(file).display().to_string();
        NVRTC.places(major, &named, &others).into_iter().map(name).collect()
    }

    #[test]
    fn files_of_the_drivers_release_come_first_but_the_user_decides() {
        let old = places(Some(12));
        assert_eq!(old[..3], ["named/libnvrtc.so.12", "named/libnvrtc.so", "named/libnvrtc.so.13"]);
        assert_eq!(old[3..6], ["-/libnvrtc.so.12", "-/libnvrtc.so", "pip/libnvrtc.so.12"]);
        assert_eq!(old[7..], ["-/libnvrtc.so.13", "pip/libnvrtc.so.13"]);
        for major in [Some(13), Some(14)] {
            let new = places(major);
            assert_eq!(new[3..5], ["-/libnvrtc.so.13", "-/libnvrtc.so"]);
            assert_eq!(new[7..], ["-/libnvrtc.so.12", "pip/libnvrtc.so.12"]);
        }
        assert_eq!(places(None)[3..6], ["-/libnvrtc.so.13", "-/libnvrtc.so.12", "-/libnvrtc.so"]);
    }

    /// A part of the C library that no program needs stands for one of NVIDIA's.
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn what_was_opened_is_never_unloaded() {
        const UNUSED: Kind = Kind { files: &["libBrokenLocale.so.1"], ..NVRTC };
        assert!(!is_loaded(UNUSED));
        // SAFETY: it has no initialisers.
        drop(unsafe { open(Path::new(UNUSED.files[0])) }.unwrap());
        assert!(is_loaded(UNUSED), "the end of a thread may still need it");
    }

    /// The C library stands for one that somebody else has loaded.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_of_the_process_is_found_and_no_other_is_loaded() {
        let kind = |files| Kind { files, ..CUDNN };
        let (_, file) = loaded(kind(&["libironhorse-has-no-such-file.so.9", "libc.so.6"])).unwrap();
        assert_eq!(file, "libc.so.6");
        assert!(real_path(Path::new(file)).is_absolute(), "the file behind the name");
        assert!(loaded(kind(&["libironhorse-has-no-such-file.so.9"])).is_none());
    }

    #[test]
    fn packages_are_those_of_the_drivers_release() {
        assert_eq!(CUDNN.package(Some(12)), "nvidia-cudnn-cu12");
        assert_eq!(NVRTC.package(Some(12)), "nvidia-cuda-nvrtc-cu12");
        assert_eq!(CUBLASLT.package(Some(13)), "nvidia-cublas");
        assert_eq!(CUDNN.package(None), "nvidia-cudnn-cu13");
    }
}
