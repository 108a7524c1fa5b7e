//! libtorch's stable C interface. Its functions are looked up in the libraries that `import torch` has loaded; this module is
//! not linked against torch.

use libloading::Library;
use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

/// The version of the interface that is used here, in torch's encoding: that of torch 2.10.
const VERSION: u64 = (2 << 56) | (10 << 48);

/// A handle that owns a reference to a tensor.
pub type RawTensor = *mut c_void;
type RawLibrary = *mut c_void;

/// An op as torch calls it, with (stack, number of arguments, number of results). The kernel takes over the handles of the
/// arguments on the stack and puts its results in their place.
pub type Kernel = unsafe extern "C-unwind" fn(*mut u64, u64, u64);

/// Zero is success. torch keeps the message of the last failure.
type Status = i32;

macro_rules! functions {
    ($(#[$doc:meta])* $table:ident { $($name:ident: fn($($arg:ty),*) $(-> $result:ty)?;)* }) => {
        $(#[$doc])*
        #[allow(clippy::missing_docs_in_private_items)]
        pub struct $table {
            $(pub $name: unsafe extern "C-unwind" fn($($arg),*) $(-> $result)?,)*
        }

        impl $table {
            fn load(library: &Library) -> Result<Self, String> {
                Ok(Self { $($name: find(library, stringify!($name))?,)* })
            }
        }
    };
}

functions! {
    /// Functions of libtorch_cpu. Only `aoti_torch_check` throws.
    Core {
        aoti_torch_check: fn(bool, *const c_char, *const c_char, u32, *const c_char);
        aoti_torch_library_init_fragment: fn(*const c_char, *const c_char, u32, *mut RawLibrary) -> Status;
        aoti_torch_library_init_impl: fn(*const c_char, *const c_char, *const c_char, u32, *mut RawLibrary) -> Status;
        aoti_torch_library_def: fn(RawLibrary, *const c_char) -> Status;
        torch_library_impl: fn(RawLibrary, *const c_char, Kernel, u64) -> Status;
        aoti_torch_get_data_ptr: fn(RawTensor, *mut *mut c_void) -> Status;
        aoti_torch_get_sizes: fn(RawTensor, *mut *const i64) -> Status;
        aoti_torch_get_strides: fn(RawTensor, *mut *const i64) -> Status;
        aoti_torch_get_dim: fn(RawTensor, *mut i64) -> Status;
        aoti_torch_get_dtype: fn(RawTensor, *mut i32) -> Status;
        aoti_torch_get_device_type: fn(RawTensor, *mut i32) -> Status;
        aoti_torch_get_device_index: fn(RawTensor, *mut i32) -> Status;
        aoti_torch_empty_strided: fn(i64, *const i64, *const i64, i32, i32, i32, *mut RawTensor) -> Status;
        aoti_torch_copy_: fn(RawTensor, RawTensor, i32) -> Status;
        aoti_torch_delete_tensor_object: fn(RawTensor) -> Status;
        aoti_torch_device_type_cpu: fn() -> i32;
        aoti_torch_device_type_cuda: fn() -> i32;
        aoti_torch_dtype_float64: fn() -> i32;
        aoti_torch_dtype_float32: fn() -> i32;
        aoti_torch_dtype_bfloat16: fn() -> i32;
        aoti_torch_dtype_float16: fn() -> i32;
        aoti_torch_dtype_int64: fn() -> i32;
        aoti_torch_dtype_int32: fn() -> i32;
        aoti_torch_dtype_uint8: fn() -> i32;
    }
}

functions! {
    /// Functions of libtorch_cuda.
    Cuda {
        aoti_torch_get_current_cuda_stream: fn(i32, *mut *mut c_void) -> Status;
    }
}

fn find<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the tables above have the types of torch's headers; the library stays loaded (`Torch` is never dropped).
    let symbol = unsafe { library.get::<T>(name) };
    symbol
        .map(|symbol| *symbol)
        .map_err(|_| format!("this torch has no `{name}`, expected torch 2.10 or newer"))
}

/// A library of torch that this process has already loaded. torch loads its libraries with local symbols, so they are not
/// found by a search of the global ones.
fn loaded(name: &str) -> Result<Library, String> {
    let file = format!("{DLL_PREFIX}{name}{DLL_SUFFIX}");
    #[cfg(unix)]
    let found = {
        use libloading::os::unix;
        /// `RTLD_NOLOAD` of dlfcn.h: no library is loaded, so no initialiser runs.
        const NOLOAD: i32 = if cfg!(target_os = "macos") { 0x10 } else { 0x4 };
        // SAFETY: `RTLD_NOLOAD` loads nothing, so no initialiser runs.
        unsafe { unix::Library::open(Some(&file), unix::RTLD_NOW | NOLOAD) }.map(Library::from)
    };
    #[cfg(windows)]
    let found = libloading::os::windows::Library::open_already_loaded(&file).map(Library::from);
    found.map_err(|error| format!("{file} is not loaded in this process: {error}"))
}

/// The functions and constants of torch that are used here; kept until the process ends.
pub struct Torch {
    core: Core,
    cuda: Result<Cuda, String>,
    what: Option<unsafe extern "C-unwind" fn() -> *const c_char>,
    /// torch's numbers of the element types f64, f32, bf16, f16, i64, i32, u8.
    pub dtypes: [i32; 7],
    /// torch's number of the device type CPU.
    pub cpu: i32,
    /// torch's number of the device type CUDA.
    pub cuda_type: i32,
    _libraries: (Library, Option<Library>),
}

static TORCH: OnceLock<Torch> = OnceLock::new();

impl Torch {
    /// Looks torch's functions up, at the first call.
    pub fn open() -> Result<&'static Self, String> {
        if let Some(torch) = TORCH.get() {
            return Ok(torch);
        }
        let found = Self::find()?;
        Ok(TORCH.get_or_init(|| found))
    }

    /// torch, if [`Self::open`] has succeeded, as it has in every kernel that torch calls.
    pub fn get() -> Option<&'static Self> {
        TORCH.get()
    }

    fn find() -> Result<Self, String> {
        let library = loaded("torch_cpu")?;
        let core = Core::load(&library)?;
        let cuda_library = loaded("torch_cuda");
        let cuda = cuda_library.as_ref().map_err(Clone::clone).and_then(Cuda::load);
        // SAFETY: functions without arguments that return a number.
        let (dtypes, cpu, cuda_type) = unsafe {
            let dtypes = [
                (core.aoti_torch_dtype_float64)(),
                (core.aoti_torch_dtype_float32)(),
                (core.aoti_torch_dtype_bfloat16)(),
                (core.aoti_torch_dtype_float16)(),
                (core.aoti_torch_dtype_int64)(),
                (core.aoti_torch_dtype_int32)(),
                (core.aoti_torch_dtype_uint8)(),
            ];
            (dtypes, (core.aoti_torch_device_type_cpu)(), (core.aoti_torch_device_type_cuda)())
        };
        // torch has it since 2.13.
        let what = find(&library, "torch_exception_get_what_without_backtrace").ok();
        Ok(Self { core, cuda, what, dtypes, cpu, cuda_type, _libraries: (library, cuda_library.ok()) })
    }

    /// The functions.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The error of a failed call: torch's message, or, before torch 2.13, only the name of the function.
    pub fn check(&self, call: &str, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: torch returns null or a text that stays valid until the next failure in this thread.
        let text = self.what.and_then(|what| unsafe {
            let text = what();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        });
        Err(text.unwrap_or_else(|| format!("torch's {call} failed; torch printed the reason to stderr")))
    }

    /// The current stream of a GPU.
    pub fn stream(&self, index: i32) -> Result<*mut c_void, String> {
        let cuda = self.cuda.as_ref().map_err(Clone::clone)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is a valid place for the result.
        let status = unsafe { (cuda.aoti_torch_get_current_cuda_stream)(index, &mut stream) };
        self.check("aoti_torch_get_current_cuda_stream", status)?;
        Ok(stream)
    }

    /// Registers ops in the namespace: their schemas, and the same kernel for CPU and CUDA. The library handles are kept until
    /// the process ends.
    pub fn define(
        &self,
        namespace: &CStr,
        ops: &[(std::ffi::CString, std::ffi::CString, Kernel)],
    ) -> Result<(), String> {
        let core = &self.core;
        let file = c"ironhorse".as_ptr();
        let mut library = std::ptr::null_mut();
        // SAFETY: the texts are NUL-terminated, and torch copies them; `library` is a valid place for the handle.
        let status =
            unsafe { (core.aoti_torch_library_init_fragment)(namespace.as_ptr(), file, 0, &mut library) };
        self.check("aoti_torch_library_init_fragment", status)?;
        for (schema, _, _) in ops {
            // SAFETY: `library` is the handle that torch gave; the schema is NUL-terminated, and torch copies it.
            let status = unsafe { (core.aoti_torch_library_def)(library, schema.as_ptr()) };
            self.check("aoti_torch_library_def", status)?;
        }
        for key in [c"CPU", c"CUDA"] {
            // SAFETY: the texts are NUL-terminated, and torch copies them; `library` is a valid place for the handle.
            let status = unsafe {
                (core.aoti_torch_library_init_impl)(namespace.as_ptr(), key.as_ptr(), file, 0, &mut library)
            };
            self.check("aoti_torch_library_init_impl", status)?;
            for (_, name, kernel) in ops {
                // SAFETY: `library` is the handle that torch gave, and torch copies the name; the kernel reads its arguments
                // by the schema of the same name.
                let status = unsafe { (core.torch_library_impl)(library, name.as_ptr(), *kernel, VERSION) };
                self.check("torch_library_impl", status)?;
            }
        }
        Ok(())
    }

    /// Throws torch's exception, which Python sees as RuntimeError.
    pub fn throw(&self, op: &CStr, text: &CStr) {
        // SAFETY: the texts are NUL-terminated, and torch copies them. The exception unwinds through this frame, in which nothing
        // needs to be dropped.
        unsafe { (self.core.aoti_torch_check)(false, op.as_ptr(), c"ironhorse".as_ptr(), 0, text.as_ptr()) }
    }
}
