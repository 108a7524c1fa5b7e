//! Every op of the table as a C function.

use crate::border::answer;
use facade::ops::{self, Stream};
use std::ffi::{c_int, c_void};

macro_rules! c_type {
    (read) => { *const f32 };
    (read_i32) => { *const i32 };
    (seeds) => { *const u64 };
    (write_i32) => { *mut i32 };
    (count) => { i64 };
    (size) => { c_int };
    (int) => { c_int };
    (flag) => { c_int };
    (number) => { f32 };
    ($array:ident) => { *mut f32 };
}

macro_rules! rust_value {
    (size $x:ident) => {
        $x.into()
    };
    (flag $x:ident) => {
        $x != 0
    };
    ($kind:ident $x:ident) => {
        $x
    };
}

macro_rules! c_functions {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident = $symbol:ident(
            $($arg:ident: $kind:ident $([$($dim:tt),*])? $({ $($option:tt)* })?),* $(,)?
        ) $({ $($more:tt)* })? => $($build:expr),+;
    )*) => { $(
        $(#[doc = $doc])+
        ///
        /// # Safety
        /// A pointer that is not null points to as many elements as `ironhorse.h` says; they stay allocated until the call
        /// has returned or, on a device, until its stream has passed the call, and no other thread writes them, or reads
        /// what is written, meanwhile.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $symbol($($arg: c_type!($kind),)* stream: *mut c_void) -> i32 {
            // SAFETY: guaranteed by the caller.
            answer(|| unsafe { ops::$name($(rust_value!($kind $arg),)* Stream(stream)) })
        }
    )* };
}

facade::for_each_op!(c_functions);
