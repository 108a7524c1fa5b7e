//! A user's own CUDA source: compiled by NVRTC for a GPU or a named architecture, kept on disk, loaded and launched.
//!
//! `signature` reads the kernels out of the text, `includes` finds what else decides the code, `kernel` runs it.

mod includes;
mod kernel;
mod signature;
mod tokens;

pub use kernel::{Arg, Dims, HostArray, Kernel};
pub use signature::{Parameter, Signature, TemplateParameter};

use crate::cache::{Cache, key};
use crate::device::Device;
use crate::ffi::nvrtc::{Nvrtc, Source as Unit};
use crate::{Error, Result};
use includes::Includes;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Headers that any source may include.
pub(crate) const HEADERS: [(&str, &str); 1] = [(
    "ironhorse.cuh",
    concat!(
        include_str!("../../kernels/common/prelude.cuh"),
        include_str!("../../kernels/common/floats.cuh"),
        include_str!("../../kernels/common/ironhorse.cuh"),
    ),
)];

/// What to compile.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// The file, as messages call it.
    pub name: String,
    /// Its text.
    pub text: String,
    /// Folders for `#include`, in order.
    pub folders: Vec<PathBuf>,
    /// Compiler flags besides the architecture.
    pub flags: Vec<String>,
}

/// Device code.
#[derive(Clone, Debug)]
pub struct Code {
    /// The CUBIN.
    pub cubin: Vec<u8>,
    /// Names that were asked for, with those in the CUBIN.
    pub lowered: Vec<(String, String)>,
    /// Warnings, and the resources of each kernel.
    pub log: String,
    /// Names everything that decides the code.
    pub key: String,
    /// Whether it was read from the cache.
    pub cached: bool,
    /// How long it took.
    pub took: Duration,
}

/// The architecture of a GPU of this machine.
pub fn arch_of(index: usize) -> Result<String> {
    Device::open(index).map(|device| device.info.arch())
}

impl Source {
    /// The kernels that the text defines; those that macros with arguments make are not seen.
    pub fn signatures(&self) -> Vec<Signature> {
        let includes = Includes::of(self.plain(), &self.folders, &[]);
        signature::read(self.plain(), &includes.texts(), &self.flags)
    }

    /// The text without a byte-order mark, which editors write and NVRTC does not know.
    fn plain(&self) -> &str {
        self.text.strip_prefix('\u{feff}').unwrap_or(&self.text)
    }

    /// The code for an architecture, with these kernels (`scale<float, 4>`) besides those of C linkage.
    pub fn compile(&self, names: &[String], arch: &str, cache: &Cache) -> Result<Code> {
        let start = std::time::Instant::now();
        for flag in &self.flags {
            if ["--gpu-architecture", "-arch", "--gpu-code", "-code"].iter().any(|own| flag.starts_with(own))
            {
                return Err(Error::Input(format!(
                    "{}: flag {flag}: give the architecture as arch",
                    self.name
                )));
            }
        }
        let nvrtc = nvrtc()?;
        let version = nvrtc.version()?;
        let system = toolkit_folders(nvrtc.path());
        let decides = |includes: &Includes| {
            let mut parts =
                vec![self.name.clone(), self.plain().to_owned(), arch.to_owned(), format!("{version:?}")];
            parts.extend(self.all_flags(&[]));
            parts.extend(names.iter().cloned());
            parts.extend(HEADERS.iter().map(|(_, text)| (*text).to_owned()));
            parts.extend(includes.parts());
            key(&parts.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let includes = Includes::of(self.plain(), &self.folders, &system);
        if let Some(path) = &includes.marked {
            return Err(Error::Input(format!(
                "{}: starts with a byte-order mark, which the compiler does not read; save it as UTF-8 without one",
                path.display()
            )));
        }
        let key = decides(&includes);
        let entry = format!("user-{key}.cubin");
        let read = || {
            let kept = includes.certain.then(|| cache.read(&entry)).flatten()?;
            let (lowered, log, cubin) = unpack(&kept)?;
            Some(Code { cubin, lowered, log, key: key.clone(), cached: true, took: start.elapsed() })
        };
        if let Some(code) = read() {
            return Ok(code);
        }
        // Threads that want the same code wait for the first of them.
        let lock = &COMPILING[usize::from(key.as_bytes()[0]) % COMPILING.len()];
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(code) = read() {
            return Ok(code);
        }
        let folders = if includes.system { &system[..] } else { &[] };
        let flags = self.all_flags(folders);
        let unit = Unit { name: &self.name, text: self.plain(), headers: &HEADERS, arch, flags: &flags };
        let (compiled, lowered) = nvrtc.compile_named(&unit, names)?;
        let lowered: Vec<_> = names.iter().cloned().zip(lowered).collect();
        tracing::info!("compiled {} for {arch} in {:?}", self.name, start.elapsed());
        // A header that was saved meanwhile: the code may be that of the old or the new one.
        if includes.certain && decides(&Includes::of(self.plain(), &self.folders, &system)) == key {
            cache.write(&entry, &pack(&lowered, &compiled.log, &compiled.cubin));
        }
        let (cubin, log) = (compiled.cubin, compiled.log);
        Ok(Code { cubin, lowered, log, key, cached: false, took: start.elapsed() })
    }

    /// Our flags, the include folders, then the user's flags.
    fn all_flags(&self, system: &[PathBuf]) -> Vec<String> {
        let standard = |flag: &&String| flag.starts_with("--std") || flag.starts_with("-std");
        let mut flags: Vec<String> =
            ["-default-device", "--extra-device-vectorization", "--generate-line-info", "--ptxas-options=-v"]
                .map(String::from)
                .into();
        if self.flags.iter().find(standard).is_none() {
            flags.push("--std=c++17".into());
        }
        if self.flags.iter().any(|flag| matches!(flag.as_str(), "-G" | "--device-debug")) {
            flags.retain(|flag| flag != "--generate-line-info");
        }
        let folders = self.folders.iter().chain(system);
        flags.extend(folders.map(|folder| format!("--include-path={}", folder.display())));
        flags.extend(self.flags.iter().cloned());
        flags
    }
}

/// Locks by the first letter of a key.
static COMPILING: [Mutex<()>; 16] = [const { Mutex::new(()) }; 16];

/// The compiler, found at first use. One that is not there is looked for again: it may be installed meanwhile.
fn nvrtc() -> Result<&'static Nvrtc> {
    static NVRTC: OnceLock<Nvrtc> = OnceLock::new();
    if let Some(nvrtc) = NVRTC.get() {
        return Ok(nvrtc);
    }
    let found = Nvrtc::load()?;
    Ok(NVRTC.get_or_init(|| found))
}

/// The folders in which the toolkit's own headers may be: beside the compiler, and where the variables say.
fn toolkit_folders(nvrtc: &Path) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = Vec::new();
    if let Some(root) = nvrtc.parent().and_then(Path::parent) {
        roots.push(root.to_owned());
        roots.extend(root.parent().map(|nvidia| nvidia.join("cuda_runtime")));
    }
    roots.extend(["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os).map(PathBuf::from));
    roots.push("/usr/local/cuda".into());
    let root = roots.into_iter().find(|root| root.join("include/cuda_fp16.h").is_file());
    let folders = root.into_iter().flat_map(|root| [root.join("include"), root.join("include/cccl")]);
    folders.filter(|folder| folder.is_dir()).collect()
}

/// An entry of the cache: the length of a JSON header, the header, the CUBIN.
fn pack(lowered: &[(String, String)], log: &str, cubin: &[u8]) -> Vec<u8> {
    let header = serde_json::json!({ "lowered": lowered, "log": log }).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(cubin);
    bytes
}

type Kept = (Vec<(String, String)>, String, Vec<u8>);

fn unpack(bytes: &[u8]) -> Option<Kept> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (header, cubin) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let (lowered, log) = {
        let header: serde_json::Value = serde_json::from_slice(header).ok()?;
        let lowered = serde_json::from_value(header.get("lowered")?.clone()).ok()?;
        (lowered, header.get("log")?.as_str()?.to_owned())
    };
    Some((lowered, log, cubin.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_and_others_do_not() {
        let lowered = vec![("f<int>".to_owned(), "_Z1f".to_owned())];
        let packed = pack(&lowered, "words", b"code");
        assert_eq!(unpack(&packed), Some((lowered, "words".into(), b"code".to_vec())));
        for short in 0..packed.len() - 4 {
            assert_eq!(unpack(&packed[..short]), None);
        }
        assert_eq!(unpack(&u64::MAX.to_le_bytes()), None);
    }

    #[test]
    fn flags_of_the_user_come_last_and_replace_the_standard() {
        let mut source = Source { flags: vec!["-std=c++20".into(), "-G".into()], ..Source::default() };
        source.folders.push("/some where".into());
        let flags = source.all_flags(&[]);
        assert!(!flags.iter().any(|flag| flag == "--std=c++17" || flag == "--generate-line-info"));
        assert_eq!(flags[flags.len() - 3..], ["--include-path=/some where", "-std=c++20", "-G"]);
    }
}
