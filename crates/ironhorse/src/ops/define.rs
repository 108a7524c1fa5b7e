//! From an entry of the table to the op: its description, its checked function, and the code that runs it.
//!
//! An entry reads
//!
//! ```text
//! /// What it computes.
//! name = c_name(
//!     argument: kind [dimensions] { .options() },
//! ) { .options() } => EagerOp { field: argument };
//! ```
//!
//! with the arguments in the order of the C function. Kinds: `read`, `write` and `update` are f32 arrays, `read_i32`,
//! `write_i32` and `seeds` (u64) others, `unused` an array that is ignored; `size` is an i64 (`int` in C), `count` is
//! an `int64_t` in C, `int` an i32, `number` an f32, `double` an f64 (not in C), `flag` a bool. A dimension is a size,
//! or one of `(a / 2)`, `(a * b)`, `(a + b)` for at least that many, and `(above i)` for more than the largest of the
//! indices i. Options are those of [`super::spec::Arg`] and [`super::spec::Op`]. In the eager op, f32 arrays are
//! `Array`s, sizes `usize`, and all else is plain.

#[rustfmt::skip]
macro_rules! role {
    (read) => { Role::Read(Elem::F32) };
    (read_i32) => { Role::Read(Elem::I32) };
    (seeds) => { Role::Read(Elem::U64) };
    (write) => { Role::Write(Elem::F32) };
    (write_i32) => { Role::Write(Elem::I32) };
    (update) => { Role::Update };
    (unused) => { Role::Unused };
    (size) => { Role::Size };
    (count) => { Role::Count };
    (int) => { Role::Int };
    (number) => { Role::Number };
    (double) => { Role::Double };
    (flag) => { Role::Flag };
}

macro_rules! rust_type {
    (read) => { *const f32 };
    (read_i32) => { *const i32 };
    (seeds) => { *const u64 };
    (write_i32) => { *mut i32 };
    (size) => { i64 };
    (count) => { i64 };
    (int) => { i32 };
    (number) => { f32 };
    (double) => { f64 };
    (flag) => { bool };
    ($array:ident) => { *mut f32 };
}

#[rustfmt::skip]
macro_rules! bind {
    (read_i32 $x:ident) => { $x.pointer().cast::<i32>().cast_const() };
    (seeds $x:ident) => { $x.pointer().cast::<u64>().cast_const() };
    (write_i32 $x:ident) => { $x.pointer().cast::<i32>() };
    (size $x:ident) => { $x.size() };
    (count $x:ident) => { $x.size() };
    (int $x:ident) => { $x.int() as i32 };
    (number $x:ident) => { $x.number() as f32 };
    (double $x:ident) => { $x.number() };
    (flag $x:ident) => { $x.flag() };
    ($array:ident $x:ident) => { Array::f32_mut($x.pointer().cast()) };
}

macro_rules! dim {
    ($names:ident ($a:ident / 2)) => {
        Dim::Half(position($names, stringify!($a)))
    };
    ($names:ident ($a:ident * $b:ident)) => {
        Dim::Times(position($names, stringify!($a)), position($names, stringify!($b)))
    };
    ($names:ident ($a:ident + $b:ident)) => {
        Dim::AtLeast(position($names, stringify!($a)), position($names, stringify!($b)))
    };
    ($names:ident (above $a:ident)) => {
        Dim::Above(position($names, stringify!($a)))
    };
    ($names:ident $a:ident) => {
        Dim::Size(position($names, stringify!($a)))
    };
}

macro_rules! define {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident = $symbol:ident(
            $($arg:ident: $kind:ident $([$($dim:tt),*])? $({ $($option:tt)* })?),* $(,)?
        ) $({ $($more:tt)* })? => $($build:expr),+;
    )*) => {
        /// Every op of this table as data, under its name.
        #[allow(non_upper_case_globals)]
        // The texts are also those of the C header and of Python: `weight[i]` in them is no link.
        #[allow(rustdoc::broken_intra_doc_links)]
        pub mod table {
            use crate::ops::sets::{ArgSet, ArgSets};
            use crate::ops::spec::{Arg, Bound, Default, Dim, Elem, Op, Python, Role, linked, position};

            $(
                $(#[doc = $doc])+
                pub static $name: Op = {
                    const NAMES: &[&str] = &[$(stringify!($arg)),*];
                    const ARGS: &[Arg] = &linked(NAMES, [$(
                        Arg::new(stringify!($arg), role!($kind), &[$($(dim!(NAMES $dim)),*)?]) $($($option)*)?
                    ),*]);
                    Op {
                        name: stringify!($name),
                        symbol: stringify!($symbol),
                        doc: concat!($($doc, "\n"),+),
                        args: ARGS,
                        python: Python::Own,
                        also: None,
                        idle: ArgSet::FIRST,
                        sets: ArgSets::of(ARGS),
                        run: super::run::$name,
                    } $($($more)*)?
                };
            )*

            /// All ops, in the order of the C header.
            pub static ALL: &[&Op] = &[$(&$name),*];
            // The options of a table need not use all of these.
            const _: (Bound, Default, Elem) = (Bound::Any, Default::Absent, Elem::F32);
        }

        mod run {
            use crate::eager::Runner;
            use crate::ops::spec::Value;
            use crate::error::{OpError, Result};
            use crate::core::eager::*;

            $(
                #[allow(unused_variables)]
                pub unsafe fn $name(values: &[Value], runner: &Runner<'_>) -> Result {
                    let &[$($arg),*] = values else { return Err(OpError::invalid("wrong number of values".into())) };
                    $(let $arg = bind!($kind $arg);)*
                    // SAFETY: `Op::call` checked the arrays, and its caller guarantees their sizes.
                    $(unsafe { runner.run(&$build) }?;)+
                    Ok(())
                }
            )*
        }

        $(
            $(#[doc = $doc])+
            ///
            /// # Safety
            /// See [the module](crate::ops): the arrays have as many elements as the table says.
            ///
            /// # Errors
            /// See [the module](crate::ops).
            #[allow(clippy::too_many_arguments)] // the order of the C function
            #[allow(rustdoc::broken_intra_doc_links)] // as in `table`
            pub unsafe fn $name($($arg: rust_type!($kind),)* stream: Stream) -> Result {
                // SAFETY: guaranteed by the caller.
                unsafe { table::$name.call(&[$(Value::from($arg)),*], stream) }
            }
        )*
    };
}
