//! One descriptor of cuDNN's backend interface, with typed attributes and errors that say which one failed.

use crate::Result;
use crate::ffi::cudnn::Cudnn;
use cudarc::cudnn::sys;
use std::ffi::c_void;
use std::fmt::Debug;
use std::rc::Rc;

pub(crate) use cudarc::cudnn::sys::cudnnBackendAttributeName_t as Attribute;
use cudarc::cudnn::sys::cudnnBackendAttributeType_t as Type;
pub(crate) use cudarc::cudnn::sys::cudnnBackendDescriptorType_t as Kind;

/// The variable that turns on a debug line for every step with a descriptor.
const TRACE_VARIABLE: &str = "IRONHORSE_CUDNN_TRACE";

/// A Rust type that an attribute may have.
pub(crate) trait Value: Copy + Debug {
    const TYPE: Type;
}

/// Says which attribute type a Rust type is; the memory of both is the same.
macro_rules! values {
    ($($rust:ty => $name:ident;)*) => {
        $(impl Value for $rust {
            const TYPE: Type = Type::$name;
        })*
    };
}
values! {
    i64 => CUDNN_TYPE_INT64;
    f32 => CUDNN_TYPE_FLOAT;
    bool => CUDNN_TYPE_BOOLEAN;
    u8 => CUDNN_TYPE_CHAR;
    *mut c_void => CUDNN_TYPE_VOID_PTR;
    sys::cudnnDataType_t => CUDNN_TYPE_DATA_TYPE;
    sys::cudnnPointwiseMode_t => CUDNN_TYPE_POINTWISE_MODE;
    sys::cudnnReduceTensorOp_t => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE;
    sys::cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE;
}

/// A descriptor, destroyed with this value.
pub(crate) struct Descriptor {
    cudnn: Rc<Cudnn>,
    raw: *mut c_void,
    kind: Kind,
    /// What it is in our graph, for messages.
    label: String,
}

impl Descriptor {
    pub fn new(cudnn: &Rc<Cudnn>, kind: Kind, label: impl Into<String>) -> Result<Self> {
        let label = label.into();
        let mut raw = std::ptr::null_mut();
        // SAFETY: cuDNN writes the pointer.
        let status = unsafe { (cudnn.cudnnBackendCreateDescriptor)(kind as u32, &mut raw) };
        cudnn.check("cudnnBackendCreateDescriptor", || format!("{kind:?} `{label}`"), status)?;
        Ok(Self { cudnn: cudnn.clone(), raw, kind, label })
    }

    pub fn raw(&self) -> *mut c_void {
        self.raw
    }

    pub fn label(&self) -> &str {
        &self.label
    }

    /// Sets an attribute to one or more values.
    pub fn set<T: Value>(&mut self, name: Attribute, values: &[T]) -> Result<()> {
        // SAFETY: the type code is that of `T`, the count that of the slice.
        unsafe { self.set_raw(name, T::TYPE, values.len(), values.as_ptr().cast(), || format!("{values:?}")) }
    }

    /// Sets an attribute to other descriptors, which must live until this one is finalised.
    pub fn set_descriptors(&mut self, name: Attribute, values: &[&Descriptor]) -> Result<()> {
        let raw: Vec<_> = values.iter().map(|value| value.raw).collect();
        let about = || values.iter().map(|value| value.label.as_str()).collect::<Vec<_>>().join(", ");
        // SAFETY: an array of live descriptors, with its length.
        unsafe {
            self.set_raw(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.len(), raw.as_ptr().cast(), about)
        }
    }

    /// Sets an attribute to a library handle.
    pub fn set_handle(&mut self, name: Attribute, handle: *mut c_void) -> Result<()> {
        // SAFETY: one handle, at an address that is valid during the call.
        unsafe {
            self.set_raw(name, Type::CUDNN_TYPE_HANDLE, 1, (&raw const handle).cast(), || "handle".into())
        }
    }

    /// # Safety
    /// `values` points at `count` values of the type.
    unsafe fn set_raw(
        &mut self,
        name: Attribute,
        kind: Type,
        count: usize,
        values: *const c_void,
        about: impl Fn() -> String,
    ) -> Result<()> {
        self.trace(|| format!("{name:?} = {}", about()));
        // SAFETY: the caller guarantees the type and the number of the values; the descriptor is alive.
        let status = unsafe {
            (self.cudnn.cudnnBackendSetAttribute)(self.raw, name as u32, kind as u32, count as i64, values)
        };
        let what = || format!("{:?} `{}`, attribute {name:?} = {}", self.kind, self.label, about());
        self.cudnn.check("cudnnBackendSetAttribute", what, status)
    }

    /// Ends the setting of attributes: cuDNN checks them now.
    pub fn finalize(&mut self) -> Result<()> {
        self.trace(|| "finalize".into());
        // SAFETY: the descriptor is alive.
        let status = unsafe { (self.cudnn.cudnnBackendFinalize)(self.raw) };
        self.cudnn.check("cudnnBackendFinalize", || format!("{:?} `{}`", self.kind, self.label), status)
    }

    /// A number.
    pub fn get_i64(&self, name: Attribute) -> Result<i64> {
        let mut value = 0_i64;
        // SAFETY: room for one number.
        unsafe { self.get_raw(name, Type::CUDNN_TYPE_INT64, 1, (&raw mut value).cast()) }?;
        Ok(value)
    }

    /// Numbers of an enumeration, at most `most` of them.
    pub fn get_codes(&self, name: Attribute, kind: Type, most: usize) -> Result<Vec<u32>> {
        let mut values = vec![0_u32; most];
        // SAFETY: room for `most` values; enumerations are 32 bits wide.
        let count = unsafe { self.get_raw(name, kind, most, values.as_mut_ptr().cast()) }?;
        values.truncate(count);
        Ok(values)
    }

    /// How many descriptors an attribute has.
    pub fn count(&self, name: Attribute) -> Result<usize> {
        // SAFETY: with a request for none, cuDNN writes the count only.
        unsafe { self.get_raw(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, std::ptr::null_mut()) }
    }

    /// Fills descriptors of the attribute's kind; returns how many were filled.
    pub fn get_descriptors(&self, name: Attribute, into: &mut [Descriptor]) -> Result<usize> {
        let mut raw: Vec<_> = into.iter().map(|into| into.raw).collect();
        // SAFETY: an array of live descriptors, with its length; cuDNN writes into what they point at.
        unsafe { self.get_raw(name, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.len(), raw.as_mut_ptr().cast()) }
    }

    /// # Safety
    /// `into` has room for `most` values of the type.
    unsafe fn get_raw(&self, name: Attribute, kind: Type, most: usize, into: *mut c_void) -> Result<usize> {
        let mut count = 0_i64;
        // SAFETY: the caller guarantees the type and room for the values; the descriptor is alive, the library writes the count.
        let status = unsafe {
            (self.cudnn.cudnnBackendGetAttribute)(
                self.raw,
                name as u32,
                kind as u32,
                most as i64,
                &mut count,
                into,
            )
        };
        let what = || format!("{:?} `{}`, attribute {name:?}", self.kind, self.label);
        self.cudnn.check("cudnnBackendGetAttribute", what, status)?;
        self.trace(|| format!("{name:?} has {count} values, {most} asked for"));
        let count = usize::try_from(count).unwrap_or(0);
        Ok(if most == 0 { count } else { count.min(most) })
    }

    fn trace(&self, what: impl FnOnce() -> String) {
        if std::env::var_os(TRACE_VARIABLE).is_some() {
            tracing::debug!("cuDNN {:?} `{}`: {}", self.kind, self.label, what());
        }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by `cudnnBackendCreateDescriptor`, destroyed once.
        let _ = unsafe { (self.cudnn.cudnnBackendDestroyDescriptor)(self.raw) };
    }
}
