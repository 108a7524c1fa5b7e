//! Loaded device code: one cache of modules and kernels per GPU, whoever asks for them. Nothing is unloaded: work that
//! uses a kernel may be running or be recorded in a graph.

use super::Device;
use crate::cache::Cache;
use crate::ffi::driver::call;
use crate::kernels::{Compiler, Kernel, Spec};
use crate::{Error, Result};
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum as Attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDim, CUlaunchConfig,
    CUmodule,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_int};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};

/// The modules and kernels of one GPU.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// What eager ops look up at each call.
    functions: RwLock<HashMap<Kernel, Function>>,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    compiler: Compiler,
    /// The cache of compiled code; `None` until someone asks.
    cache: Option<Cache>,
    modules: HashMap<Code, Module>,
    /// Kernels of users, by the key of their source and their name there.
    users: HashMap<(String, String), Function>,
}

/// What decides the code of a module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Code {
    Ours(Spec),
    /// A user's source, by the key of everything that decides its code.
    Users(String),
}

impl Modules {
    fn lock(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device {
    /// Keeps code that is compiled from now on in this folder instead of the user's cache folder.
    pub(crate) fn keep_code_in(&self, cache: Cache) {
        self.modules.lock().cache = Some(cache);
    }

    /// A kernel, compiled or read from the cache at its first use. The context is current.
    pub(crate) fn function(&'static self, kernel: &Kernel) -> Result<Function> {
        let known =
            self.modules.functions.read().unwrap_or_else(PoisonError::into_inner).get(kernel).copied();
        if let Some(function) = known {
            return Ok(function);
        }
        let module = {
            let mut guard = self.modules.lock();
            let Loaded { compiler, cache, modules, .. } = &mut *guard;
            match modules.entry(Code::Ours(kernel.spec.clone())) {
                Entry::Occupied(module) => *module.get(),
                Entry::Vacant(place) => {
                    let cache = cache.get_or_insert_with(|| Cache::open(None));
                    let load = |cubin: &[u8]| Module::load(self, cubin);
                    *place.insert(compiler.load(&kernel.spec, &self.info.arch(), cache, load)?)
                }
            }
        };
        let function = Function::new(self, module.function(self, kernel.name)?);
        let mut functions = self.modules.functions.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been first: all launches must share one record of the shared memory they
        // may use.
        Ok(*functions.entry(kernel.clone()).or_insert(function))
    }

    /// A kernel of a user's compiled source. The context is current.
    pub(crate) fn users_function(&'static self, key: &str, cubin: &[u8], name: &str) -> Result<Function> {
        let mut guard = self.modules.lock();
        let Loaded { modules, users, .. } = &mut *guard;
        let named = (key.to_owned(), name.to_owned());
        if let Some(function) = users.get(&named) {
            return Ok(*function);
        }
        let module = match modules.entry(Code::Users(key.to_owned())) {
            Entry::Occupied(module) => *module.get(),
            Entry::Vacant(place) => *place.insert(Module::load(self, cubin)?),
        };
        let function = Function::new(self, module.function(self, name)?);
        Ok(*users.entry(named).or_insert(function))
    }
}

/// A loaded CUBIN.
#[derive(Clone, Copy, Debug)]
struct Module(CUmodule);

// SAFETY: a handle of the driver, which allows its use from any thread; it is never destroyed.
unsafe impl Send for Module {}

impl Module {
    fn load(device: &Device, cubin: &[u8]) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        call!(device, cuModuleLoadData(&mut raw, cubin.as_ptr().cast()))?;
        Ok(Self(raw))
    }

    /// The handle of one of its kernels.
    fn function(self, device: &Device, name: &str) -> Result<CUfunction> {
        let text = CString::new(name).map_err(|_| Error::Input(format!("kernel name {name:?}")))?;
        let mut raw = std::ptr::null_mut();
        call!(device, cuModuleGetFunction(&mut raw, self.0, text.as_ptr()))?;
        Ok(raw)
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    device: &'static Device,
    raw: CUfunction,
    /// Shared by all copies.
    shared: &'static Allowance,
}

// SAFETY: a handle of the driver, which allows its use from any thread; it is never destroyed.
unsafe impl Send for Function {}
// SAFETY: as above; the allowance is made for several threads.
unsafe impl Sync for Function {}

impl Function {
    fn new(device: &'static Device, raw: CUfunction) -> Self {
        Self { device, raw, shared: Box::leak(Box::default()) } // one per kernel, as long-lived as its module
    }

    /// The handle for a launch with this much dynamic shared memory, which the driver is asked to allow.
    pub fn raw(self, shared: u32) -> Result<CUfunction> {
        self.shared.raise(shared, || {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as u32;
            call!(self.device, cuFuncSetAttribute(self.raw, attribute, shared as c_int))
        })?;
        Ok(self.raw)
    }

    /// A number that the driver knows about it.
    pub fn attribute(self, which: Attribute) -> Result<u32> {
        let mut value = 0;
        call!(self.device, cuFuncGetAttribute(&mut value, which as u32, self.raw))?;
        Ok(value.max(0) as u32)
    }

    /// Asks for as much of the L1 cache as possible to be shared memory. Kernels that run on a multiprocessor at the same
    /// time must agree on that.
    pub fn prefer_shared(self) -> Result<()> {
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT as u32;
        call!(self.device, cuFuncSetAttribute(self.raw, attribute, 100))
    }

    /// How many blocks of this size the device holds at a time, at least one on each multiprocessor.
    pub fn resident(self, threads: u32, shared: usize) -> Result<usize> {
        let mut blocks = 0;
        let raw = self.raw(shared as u32)?;
        call!(
            self.device,
            cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, raw, threads as c_int, shared)
        )?;
        Ok(self.device.info.sms as usize * blocks.max(1) as usize)
    }

    /// How many clusters of `size` blocks the device holds at a time: its multiprocessors come in groups, and a cluster
    /// fits into one.
    pub fn resident_clusters(self, size: u32, threads: u32, shared: usize) -> Result<u32> {
        let (mut clusters, raw) = (0, self.raw(shared as u32)?);
        let mut attribute = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { clusterDim: ClusterDim { x: size, y: 1, z: 1 } },
        };
        let config = CUlaunchConfig {
            gridDimX: size,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared as u32,
            hStream: std::ptr::null_mut(),
            attrs: &mut attribute,
            numAttrs: 1,
        };
        call!(self.device, cuOccupancyMaxActiveClusters(&mut clusters, raw, &config))?;
        Ok(clusters.max(0) as u32)
    }
}

/// The dynamic shared memory that the launches of a kernel may ask for: it only grows, for all threads.
#[derive(Debug, Default)]
struct Allowance {
    bytes: AtomicU32,
    raising: Mutex<()>,
}

impl Allowance {
    /// Allows at least `bytes` by calling `set`, unless they are allowed already.
    fn raise(&self, bytes: u32, set: impl FnOnce() -> Result<()>) -> Result<()> {
        if bytes <= self.bytes.load(Ordering::Acquire) {
            return Ok(());
        }
        // Under a lock: a thread that asks for less must not lower what another has set meanwhile.
        let _raising = self.raising.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > self.bytes.load(Ordering::Acquire) {
            set()?;
            self.bytes.store(bytes, Ordering::Release);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn an_allowance_is_never_lowered() {
        let (allowance, driver) = (Allowance::default(), Cell::new(0));
        let ask = |bytes: u32| {
            allowance
                .raise(bytes, || {
                    driver.set(bytes);
                    Ok(())
                })
                .unwrap();
            driver.get()
        };
        assert_eq!(ask(0), 0, "no dynamic shared memory needs no permission");
        assert_eq!(ask(100 << 10), 100 << 10);
        assert_eq!(ask(60 << 10), 100 << 10, "a smaller launch lowers nothing");
        assert_eq!(ask(200 << 10), 200 << 10);
        let refused = allowance.raise(300 << 10, || Err(Error::Unsupported("too much".into())));
        assert!(refused.is_err());
        assert_eq!(
            allowance.bytes.load(Ordering::Relaxed),
            200 << 10,
            "a refusal is not remembered as allowed"
        );
    }

    #[test]
    fn threads_that_ask_at_once_end_at_the_largest() {
        let (allowance, driver) = (Allowance::default(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for bytes in 1..=8_u32 {
                let (allowance, driver) = (&allowance, &driver);
                scope.spawn(move || {
                    allowance.raise(bytes << 14, || {
                        driver.store(bytes << 14, Ordering::Relaxed);
                        Ok(())
                    })
                });
            }
        });
        assert_eq!(driver.load(Ordering::Relaxed), 8 << 14);
    }
}
