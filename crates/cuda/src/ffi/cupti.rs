//! CUPTI: when each kernel started and ended, as the device says.
//!
//! Records come in buffers that we lend and that CUPTI hands back on a thread of its own. Only the first fields of a
//! record are read: from CUDA 12.0 to 13.4 the library writes longer and longer records, all with these fields first.

use super::library::{self, CUPTI, functions};
use crate::{Error, Result};
use std::alloc::Layout;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);
type GetNextRecord = unsafe extern "C" fn(*mut u8, usize, *mut *mut c_void) -> u32;

functions! {
    /// CUPTI's functions.
    Cupti of CUPTI;
    fn cuptiGetVersion(*mut u32) -> u32;
    fn cuptiActivityRegisterCallbacks(Requested, Completed) -> u32;
    fn cuptiActivityEnable(u32) -> u32;
    fn cuptiActivityDisable(u32) -> u32;
    fn cuptiActivityFlushAll(u32) -> u32;
    fn cuptiActivityGetNextRecord(*mut u8, usize, *mut *mut c_void) -> u32;
    fn cuptiActivityPushExternalCorrelationId(u32, u64) -> u32;
    fn cuptiActivityPopExternalCorrelationId(u32, *mut u64) -> u32;
}

// `CUPTI_ACTIVITY_KIND_*`
const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;
const DRIVER: u32 = 4;
const RUNTIME: u32 = 5;
const CONCURRENT_KERNEL: u32 = 10;
const EXTERNAL_CORRELATION: u32 = 39;
/// An external correlation record comes with the record of an API call, so calls are recorded too.
const KINDS: [u32; 6] = [EXTERNAL_CORRELATION, RUNTIME, DRIVER, CONCURRENT_KERNEL, MEMCPY, MEMSET];
/// `CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0`
const CUSTOM: u32 = 3;
/// `CUPTI_ACTIVITY_FLAG_FLUSH_FORCED`: buffers that are not full too
const FLUSH_FORCED: u32 = 1;
/// Versions whose records are known: CUDA 12.0 and later write 18 to 28, then 130000 and so on.
const KNOWN: [std::ops::Range<u32>; 2] = [18..100, 130_000..140_000];

/// The start of `CUpti_ActivityKernel4` and all later ones.
#[repr(C)]
struct Kernel {
    kind: u32,
    config: [u8; 12],
    start: u64,
    end: u64,
    completed: u64,
    ids_and_sizes: [u32; 13],
    correlation: u32,
    grid_id: i64,
    name: *const c_char,
}

/// The start of `CUpti_ActivityMemcpy*` and `CUpti_ActivityMemset*` alike.
#[repr(C)]
struct Transfer {
    kind: u32,
    what: u32,
    bytes: u64,
    start: u64,
    end: u64,
    ids: [u32; 3],
    correlation: u32,
}

/// `CUpti_ActivityExternalCorrelation`.
#[repr(C)]
struct External {
    kind: u32,
    external_kind: u32,
    id: u64,
    correlation: u32,
}

/// Something the device did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// The kernel's name as compiled, or `copy` and `zero`.
    pub name: String,
    /// Start, in nanoseconds of the device's clock.
    pub start: u64,
    /// End, in nanoseconds of the device's clock.
    pub end: u64,
    /// Identifies the call that asked for it.
    correlation: u32,
}

#[derive(Debug, Default)]
struct Collected {
    activities: Vec<Activity>,
    /// The number we gave with [`Recorder::during`], by the call's number.
    external: HashMap<u32, u64>,
}

static COLLECTED: Mutex<Option<Collected>> = Mutex::new(None);
static NEXT_RECORD: OnceLock<GetNextRecord> = OnceLock::new();
/// Never unloaded: its threads may still call back.
static LIBRARY: OnceLock<Result<Cupti>> = OnceLock::new();

const BUFFER_BYTES: usize = 4 << 20;
const BUFFER_ALIGN: usize = 8;

fn collected() -> MutexGuard<'static, Option<Collected>> {
    COLLECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A recording under way; it ends when this is dropped.
#[derive(Debug)]
pub struct Recorder {
    cupti: &'static Cupti,
    enabled: Vec<u32>,
}

impl Recorder {
    /// Starts to record. Fails if CUPTI is missing, of a version not known, or in use by another profiler. A device must
    /// be open: without a driver CUPTI's calls, even that for its version, crash.
    pub(crate) fn start() -> Result<Self> {
        let cupti = LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)?;
        *collected() = Some(Collected::default());
        let mut recorder = Self { cupti, enabled: Vec::new() };
        for kind in KINDS {
            // SAFETY: a kind of the header.
            check("cuptiActivityEnable", unsafe { (cupti.cuptiActivityEnable)(kind) })?;
            recorder.enabled.push(kind);
        }
        Ok(recorder)
    }

    /// What `work` puts on the device belongs to `id`.
    pub fn during(&self, id: u64, work: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: a kind of the header; what is pushed here is popped below.
        let pushed = unsafe { (self.cupti.cuptiActivityPushExternalCorrelationId)(CUSTOM, id) };
        check("cuptiActivityPushExternalCorrelationId", pushed)?;
        let done = work();
        let mut last = 0;
        // SAFETY: as above; the library writes the number.
        let popped = unsafe { (self.cupti.cuptiActivityPopExternalCorrelationId)(CUSTOM, &mut last) };
        done.and(check("cuptiActivityPopExternalCorrelationId", popped))
    }

    /// Everything recorded, in order of start, each with the id of its call. The caller has waited for the device.
    pub fn finish(self) -> Result<Vec<(Option<u64>, Activity)>> {
        // SAFETY: a flag of the header.
        check("cuptiActivityFlushAll", unsafe { (self.cupti.cuptiActivityFlushAll)(FLUSH_FORCED) })?;
        drop(self);
        let Collected { mut activities, external } = collected().take().unwrap_or_default();
        activities.sort_by_key(|activity| activity.start);
        let with_id = |activity: Activity| (external.get(&activity.correlation).copied(), activity);
        Ok(activities.into_iter().map(with_id).collect())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        for &kind in &self.enabled {
            // SAFETY: enabled in `start`.
            let _ = unsafe { (self.cupti.cuptiActivityDisable)(kind) };
        }
    }
}

fn open() -> Result<Cupti> {
    let cupti = Cupti::load()?;
    let mut version = 0;
    // SAFETY: the library writes the version.
    check("cuptiGetVersion", unsafe { (cupti.cuptiGetVersion)(&mut version) })?;
    if !KNOWN.iter().any(|known| known.contains(&version)) {
        return Err(Error::Unsupported(format!("CUPTI has version {version}, whose records are not known")));
    }
    let _ = NEXT_RECORD.set(cupti.cuptiActivityGetNextRecord);
    // SAFETY: both functions are as the header asks and live as long as the program.
    let status = unsafe { (cupti.cuptiActivityRegisterCallbacks)(lend_buffer, take_buffer) };
    check("cuptiActivityRegisterCallbacks", status)?;
    Ok(cupti)
}

fn check(call: &'static str, status: u32) -> Result<()> {
    library::check("CUPTI", call, status.into(), "")
}

/// Lends CUPTI a buffer. Nothing here can panic: the caller is C.
unsafe extern "C" fn lend_buffer(buffer: *mut *mut u8, size: *mut usize, most_records: *mut usize) {
    let start = match Layout::from_size_align(BUFFER_BYTES, BUFFER_ALIGN) {
        Ok(layout) => {
            // SAFETY: the layout has a size.
            unsafe { std::alloc::alloc(layout) }
        }
        Err(_) => std::ptr::null_mut(),
    };
    // SAFETY: CUPTI gives three places to write to; without a buffer it drops records.
    unsafe {
        *buffer = start;
        *size = if start.is_null() { 0 } else { BUFFER_BYTES };
        *most_records = 0; // as many as fit
    }
}

/// Reads a buffer CUPTI hands back, and frees it.
unsafe extern "C" fn take_buffer(
    _context: *mut c_void,
    _stream: u32,
    buffer: *mut u8,
    size: usize,
    valid: usize,
) {
    if buffer.is_null() {
        return;
    }
    if let (Some(next), Some(collected)) = (NEXT_RECORD.get(), collected().as_mut()) {
        let mut record: *mut c_void = std::ptr::null_mut();
        // SAFETY: the buffer holds `valid` bytes of records; CUPTI moves `record` from one to the next and says when
        // there is none.
        unsafe {
            while valid > 0 && next(buffer, valid, &mut record) == 0 && !record.is_null() {
                read_record(record, collected);
            }
        }
    }
    if let Ok(layout) = Layout::from_size_align(size, BUFFER_ALIGN) {
        // SAFETY: CUPTI returns the size we gave, so this is the layout of `lend_buffer`.
        unsafe { std::alloc::dealloc(buffer, layout) };
    }
}

/// # Safety
/// `record` is a record of CUPTI: it starts with its kind, and is at least as long as our struct for that kind.
unsafe fn read_record(record: *const c_void, collected: &mut Collected) {
    // SAFETY: the caller guarantees a record of this kind; unaligned reads, as CUPTI packs records to 8 bytes.
    unsafe {
        match record.cast::<u32>().read_unaligned() {
            CONCURRENT_KERNEL => {
                let kernel = record.cast::<Kernel>().read_unaligned();
                let name = if kernel.name.is_null() {
                    "kernel".into()
                } else {
                    CStr::from_ptr(kernel.name).to_string_lossy().into_owned()
                };
                collected.push(name, [kernel.start, kernel.end], kernel.correlation);
            }
            kind @ (MEMCPY | MEMSET) => {
                let transfer = record.cast::<Transfer>().read_unaligned();
                let name = if kind == MEMCPY { "copy" } else { "zero" };
                collected.push(name.into(), [transfer.start, transfer.end], transfer.correlation);
            }
            EXTERNAL_CORRELATION => {
                let external = record.cast::<External>().read_unaligned();
                if external.external_kind == CUSTOM {
                    collected.external.insert(external.correlation, external.id);
                }
            }
            _ => {}
        }
    }
}

impl Collected {
    /// CUPTI writes 0 where it could not take the time; such a record says nothing.
    fn push(&mut self, name: String, [start, end]: [u64; 2], correlation: u32) {
        if start != 0 && end >= start {
            self.activities.push(Activity { name, start, end, correlation });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::cupti::sys;
    use std::mem::offset_of;

    #[test]
    fn the_fields_are_where_cupti_writes_them() {
        macro_rules! same {
            ($ours:ident, $theirs:ident, $($field:ident = $their_field:ident),*) => {
                $(assert_eq!(
                    offset_of!($ours, $field),
                    offset_of!(sys::$theirs, $their_field),
                    concat!(stringify!($theirs), ".", stringify!($their_field))
                );)*
                assert!(size_of::<$ours>() <= size_of::<sys::$theirs>());
            };
        }
        macro_rules! kernels {
            ($($theirs:ident),*) => {
                $(same!(Kernel, $theirs, start = start, end = end, correlation = correlationId, name = name);)*
            };
        }
        // 12.0 writes Kernel8, later 12.x Kernel9, 13.0 Kernel10; 13.1 and later only add at the end
        kernels!(CUpti_ActivityKernel8, CUpti_ActivityKernel9, CUpti_ActivityKernel10);
        macro_rules! transfers {
            ($($theirs:ident),*) => {
                $(same!(Transfer, $theirs, start = start, end = end, correlation = correlationId);)*
            };
        }
        transfers!(CUpti_ActivityMemcpy5, CUpti_ActivityMemcpy6, CUpti_ActivityMemset4);
        same!(
            External,
            CUpti_ActivityExternalCorrelation,
            external_kind = externalKind,
            id = externalId,
            correlation = correlationId
        );
    }

    #[test]
    fn records_are_read() {
        let name = c"gelu_fwd";
        let kernel = Kernel {
            kind: CONCURRENT_KERNEL,
            config: [0; 12],
            start: 10,
            end: 30,
            completed: 0,
            ids_and_sizes: [0; 13],
            correlation: 7,
            grid_id: 0,
            name: name.as_ptr(),
        };
        let zero =
            Transfer { kind: MEMSET, what: 0, bytes: 8, start: 3, end: 5, ids: [0; 3], correlation: 6 };
        let external = External { kind: EXTERNAL_CORRELATION, external_kind: CUSTOM, id: 99, correlation: 7 };
        let mut collected = Collected::default();
        // SAFETY: each record is the struct of its kind.
        unsafe {
            read_record(std::ptr::from_ref(&kernel).cast(), &mut collected);
            read_record(std::ptr::from_ref(&zero).cast(), &mut collected);
            read_record(std::ptr::from_ref(&external).cast(), &mut collected);
        }
        let names: Vec<&str> = collected.activities.iter().map(|activity| activity.name.as_str()).collect();
        assert_eq!(names, ["gelu_fwd", "zero"]);
        assert_eq!((collected.activities[0].start, collected.activities[0].end), (10, 30));
        assert_eq!(collected.external.get(&7), Some(&99));
    }
}
