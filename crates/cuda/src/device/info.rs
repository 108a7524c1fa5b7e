//! The GPUs that the driver sees, and their properties.

use crate::ffi::driver::Driver;
use crate::{Error, Result};
use cudarc::driver::sys::{
    CUdevice, CUdevice_P2PAttribute_enum as P2p, CUdevice_attribute_enum as Attribute,
};
use std::ffi::CStr;

/// The properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its index.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub compute: (u32, u32),
    /// Multiprocessors.
    pub sms: u32,
    /// Bytes of memory.
    pub memory: usize,
    /// Bytes of L2 cache.
    pub l2: usize,
    /// Bytes of shared memory that a block may ask for.
    pub shared_per_block: usize,
}

/// The first compute capability that copies bytes to shared memory by itself.
const BULK_COPY_COMPUTE: (u32, u32) = (9, 0);
/// The first compute capability with clusters of blocks.
const CLUSTER_COMPUTE: (u32, u32) = (9, 0);
/// The first compute capability with products of 8-bit numbers.
pub(crate) const FP8_COMPUTE: (u32, u32) = (8, 9);

impl DeviceInfo {
    /// Whether its tensor cores multiply 8-bit numbers.
    pub fn has_fp8(&self) -> bool {
        self.compute >= FP8_COMPUTE
    }

    /// Whether blocks can be launched in clusters, which reach each other's shared memory: of up to 8 on every such device.
    pub fn has_clusters(&self) -> bool {
        self.compute >= CLUSTER_COMPUTE
    }

    /// Whether experts/grouped_fp8.cu runs on it.
    pub fn has_fp8_experts(&self) -> bool {
        self.compute == (9, 0)
    }

    /// Whether it copies contiguous bytes to shared memory by itself (`cp.async.bulk`).
    pub fn has_bulk_copies(&self) -> bool {
        self.compute >= BULK_COPY_COMPUTE
    }

    /// The architecture NVRTC compiles for: `sm_90a`, `sm_80`.
    pub fn arch(&self) -> String {
        let (major, minor) = self.compute;
        format!("sm_{major}{minor}{}", if self.compute == (9, 0) { "a" } else { "" })
    }
}

/// The oldest driver that is supported: that of CUDA 12.0, version 525.
const LEAST_DRIVER: u32 = 12000;
/// The oldest driver whose graphs keep programmatic dependent launches: that of CUDA 12.3.
const CHAINING_DRIVER: u32 = 12030;
/// The oldest compute capability that is supported: the first with bf16 tensor cores.
const LEAST_COMPUTE: (u32, u32) = (8, 0);

/// All GPUs of this machine.
pub(super) fn list() -> Result<Vec<DeviceInfo>> {
    let driver = start()?;
    (0..count(&driver)?).map(|index| describe(&driver, index).map(|(info, _)| info)).collect()
}

/// How a GPU reaches another of the same machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The GPU that reaches the other.
    pub from: usize,
    /// The GPU that is reached.
    pub to: usize,
    /// Whether it reads and writes the memory of the other without the host.
    pub access: bool,
    /// Whether its atomic operations reach that memory, too: over NVLink they do, over PCIe they do not.
    pub atomics: bool,
}

/// How every GPU reaches every other.
pub(crate) fn peers() -> Result<Vec<Peer>> {
    let driver = start()?;
    let devices: Vec<(usize, CUdevice)> = (0..count(&driver)?)
        .map(|index| describe(&driver, index).map(|(_, raw)| (index, raw)))
        .collect::<Result<_>>()?;
    let asked = |which: P2p, from: CUdevice, to: CUdevice| -> Result<bool> {
        let mut value = 0;
        // SAFETY: the driver writes the value; both handles are the driver's.
        let status = unsafe { (driver.cuDeviceGetP2PAttribute)(&mut value, which as u32, from, to) };
        driver.check("cuDeviceGetP2PAttribute", status)?;
        Ok(value != 0)
    };
    let mut peers = Vec::new();
    for &(from, a) in &devices {
        for &(to, b) in devices.iter().filter(|(to, _)| *to != from) {
            let access = asked(P2p::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, a, b)?;
            let atomics = asked(P2p::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, a, b)?;
            peers.push(Peer { from, to, access, atomics });
        }
    }
    Ok(peers)
}

/// A GPU by index, if it exists and is new enough.
pub(super) fn choose(index: usize) -> Result<(Driver, DeviceInfo, CUdevice)> {
    let driver = start()?;
    let count = count(&driver)?;
    if count == 0 {
        return Err(Error::NoDevice(
            "the driver sees no GPU (is CUDA_VISIBLE_DEVICES empty?); use --device cpu".into(),
        ));
    }
    if index >= count {
        let last = count - 1;
        return Err(Error::NoDevice(format!(
            "there is no GPU {index}: this machine has {count}, cuda:0 to cuda:{last}"
        )));
    }
    let (info, raw) = describe(&driver, index)?;
    if info.compute < LEAST_COMPUTE {
        return Err(Error::NoDevice(format!(
            "{} has compute capability {}.{}; bf16 tensor cores need 8.0 or newer; use --device cpu",
            info.name, info.compute.0, info.compute.1
        )));
    }
    Ok((driver, info, raw))
}

/// Loads the driver and initialises it.
fn start() -> Result<Driver> {
    let driver = Driver::load()?;
    let version = version(&driver)?;
    if version < LEAST_DRIVER {
        return Err(Error::NoDevice(format!(
            "the NVIDIA driver is too old: it supports CUDA {}.{}, 12.0 is needed; install driver 525 or newer",
            version / 1000,
            version % 1000 / 10
        )));
    }
    // SAFETY: the flags must be 0.
    driver.check("cuInit", unsafe { (driver.cuInit)(0) }).map_err(|error| {
        Error::NoDevice(format!("{error}: no usable GPU; check nvidia-smi, or use --device cpu"))
    })?;
    Ok(driver)
}

/// The CUDA version the driver is for: 12030 means 12.3.
fn version(driver: &Driver) -> Result<u32> {
    let mut version = 0;
    // SAFETY: the driver writes the version.
    driver.check("cuDriverGetVersion", unsafe { (driver.cuDriverGetVersion)(&mut version) })?;
    Ok(version.max(0) as u32)
}

/// Whether a kernel can start before the one ahead of it has ended, also in a graph.
pub(super) fn chains(driver: &Driver, info: &DeviceInfo) -> Result<bool> {
    Ok(info.compute >= (9, 0) && version(driver)? >= CHAINING_DRIVER)
}

fn count(driver: &Driver) -> Result<usize> {
    let mut count = 0;
    // SAFETY: the driver writes the count.
    driver.check("cuDeviceGetCount", unsafe { (driver.cuDeviceGetCount)(&mut count) })?;
    Ok(count.max(0) as usize)
}

fn describe(driver: &Driver, index: usize) -> Result<(DeviceInfo, CUdevice)> {
    let mut raw = 0;
    // SAFETY: the driver writes the handle.
    driver.check("cuDeviceGet", unsafe { (driver.cuDeviceGet)(&mut raw, index as i32) })?;
    let mut name = [0_i8; 256];
    // SAFETY: the driver writes at most 256 bytes and terminates them with 0.
    let status = unsafe { (driver.cuDeviceGetName)(name.as_mut_ptr().cast(), 256, raw) };
    driver.check("cuDeviceGetName", status)?;
    // SAFETY: terminated with 0 by the driver; the array was zeroed before.
    let name = unsafe { CStr::from_ptr(name.as_ptr().cast()) }.to_string_lossy().into_owned();
    let attribute = |which: Attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: the driver writes the value.
        let status = unsafe { (driver.cuDeviceGetAttribute)(&mut value, which as u32, raw) };
        driver.check("cuDeviceGetAttribute", status)?;
        Ok(value.max(0) as u32)
    };
    let mut memory = 0;
    // SAFETY: the driver writes the size.
    driver.check("cuDeviceTotalMem", unsafe { (driver.cuDeviceTotalMem_v2)(&mut memory, raw) })?;
    let info = DeviceInfo {
        index,
        name,
        compute: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sms: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory,
        l2: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        shared_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
            as usize,
    };
    Ok((info, raw))
}
