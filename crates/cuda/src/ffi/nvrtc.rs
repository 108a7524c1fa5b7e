//! NVRTC: CUDA C++ to device code, in the process.

use super::library::{self, NVRTC, functions};
use crate::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_void};

functions! {
    /// NVRTC's functions.
    Nvrtc of NVRTC;
    fn nvrtcVersion(*mut c_int, *mut c_int) -> i32;
    fn nvrtcCreateProgram(*mut *mut c_void, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> i32;
    fn nvrtcDestroyProgram(*mut *mut c_void) -> i32;
    fn nvrtcCompileProgram(*mut c_void, c_int, *const *const c_char) -> i32;
    fn nvrtcGetProgramLogSize(*mut c_void, *mut usize) -> i32;
    fn nvrtcGetProgramLog(*mut c_void, *mut c_char) -> i32;
    fn nvrtcGetCUBINSize(*mut c_void, *mut usize) -> i32;
    fn nvrtcGetCUBIN(*mut c_void, *mut c_char) -> i32;
    fn nvrtcAddNameExpression(*mut c_void, *const c_char) -> i32;
    fn nvrtcGetLoweredName(*mut c_void, *const c_char, *mut *const c_char) -> i32;
}

/// What to compile.
pub struct Source<'a> {
    /// The file's name, for messages.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
    /// Headers by the name they are included with.
    pub headers: &'a [(&'a str, &'a str)],
    /// `sm_90a` and the like.
    pub arch: &'a str,
    /// Compiler flags besides the architecture.
    pub flags: &'a [String],
}

/// Device code, and what the compiler said.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The CUBIN.
    pub cubin: Vec<u8>,
    /// Warnings and, with `--ptxas-options=-v`, the resources of each kernel.
    pub log: String,
}

impl Nvrtc {
    /// (major, minor).
    pub fn version(&self) -> Result<(i32, i32)> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library writes both.
        check("nvrtcVersion", unsafe { (self.nvrtcVersion)(&mut major, &mut minor) })?;
        Ok((major, minor))
    }

    /// Compiles to a CUBIN.
    pub fn compile(&self, source: &Source) -> Result<Compiled> {
        self.compile_named(source, &[]).map(|(compiled, _)| compiled)
    }

    /// Compiles to a CUBIN that has these kernels (`scale<float, 4>`), and says what each is called there.
    pub fn compile_named(&self, source: &Source, names: &[String]) -> Result<(Compiled, Vec<String>)> {
        let c = |text: &str| {
            CString::new(text).map_err(|_| Error::Unsupported("a source with a NUL byte".into()))
        };
        let (name, text) = (c(source.name)?, c(source.text)?);
        let header_texts: Vec<CString> =
            source.headers.iter().map(|(_, text)| c(text)).collect::<Result<_>>()?;
        let header_names: Vec<CString> =
            source.headers.iter().map(|(name, _)| c(name)).collect::<Result<_>>()?;
        let header_text_ptrs: Vec<_> = header_texts.iter().map(|text| text.as_ptr()).collect();
        let header_name_ptrs: Vec<_> = header_names.iter().map(|name| name.as_ptr()).collect();
        let arch = format!("--gpu-architecture={}", source.arch);
        let flags: Vec<CString> =
            std::iter::once(&arch).chain(source.flags).map(|flag| c(flag)).collect::<Result<_>>()?;
        let flag_ptrs: Vec<_> = flags.iter().map(|flag| flag.as_ptr()).collect();
        let mut program = Program { nvrtc: self, raw: std::ptr::null_mut() };
        // SAFETY: all texts outlive the program, counts are those of the arrays.
        let status = unsafe {
            (self.nvrtcCreateProgram)(
                &mut program.raw,
                text.as_ptr(),
                name.as_ptr(),
                header_text_ptrs.len() as c_int,
                header_text_ptrs.as_ptr(),
                header_name_ptrs.as_ptr(),
            )
        };
        check("nvrtcCreateProgram", status)?;
        let names: Vec<CString> = names.iter().map(|name| c(name)).collect::<Result<_>>()?;
        for name in &names {
            // SAFETY: the program is alive and not compiled yet; the library copies the text.
            let status = unsafe { (self.nvrtcAddNameExpression)(program.raw, name.as_ptr()) };
            check("nvrtcAddNameExpression", status)?;
        }
        // SAFETY: the program is alive, the flags outlive the call.
        let compiled =
            unsafe { (self.nvrtcCompileProgram)(program.raw, flag_ptrs.len() as c_int, flag_ptrs.as_ptr()) };
        let log =
            program.bytes("nvrtcGetProgramLog", self.nvrtcGetProgramLogSize, self.nvrtcGetProgramLog)?;
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
        if compiled != 0 {
            let log = if log.is_empty() { format!("NVRTC status {compiled}") } else { log };
            return Err(Error::Compile { file: source.name.into(), arch: source.arch.into(), log });
        }
        let cubin = program.bytes("nvrtcGetCUBIN", self.nvrtcGetCUBINSize, self.nvrtcGetCUBIN)?;
        let lowered = names.iter().map(|name| program.lowered(name)).collect::<Result<_>>()?;
        Ok((Compiled { cubin, log }, lowered))
    }
}

type SizeOf = unsafe extern "C" fn(*mut c_void, *mut usize) -> i32;
type Copy = unsafe extern "C" fn(*mut c_void, *mut c_char) -> i32;

struct Program<'a> {
    nvrtc: &'a Nvrtc,
    raw: *mut c_void,
}

impl Program<'_> {
    fn bytes(&self, call: &'static str, size_of: SizeOf, copy: Copy) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive, the library writes the size.
        check(call, unsafe { size_of(self.raw, &mut size) })?;
        let mut bytes = vec![0_u8; size];
        // SAFETY: the library writes as many bytes as it said.
        check(call, unsafe { copy(self.raw, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn lowered(&self, name: &CStr) -> Result<String> {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the program is alive and compiled; the library writes a pointer to a text of the program.
        let status = unsafe { (self.nvrtc.nvrtcGetLoweredName)(self.raw, name.as_ptr(), &mut text) };
        check("nvrtcGetLoweredName", status)?;
        // SAFETY: ended with 0, and good as long as the program.
        Ok(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by `nvrtcCreateProgram`, destroyed once.
            let _ = unsafe { (self.nvrtc.nvrtcDestroyProgram)(&mut self.raw) };
        }
    }
}

fn check(call: &'static str, status: i32) -> Result<()> {
    library::check("NVRTC", call, status.into(), "")
}
