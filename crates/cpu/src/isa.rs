//! Which instructions this machine has, found out at run time, and [`multiversion!`](crate::multiversion), which
//! compiles one body for each of them.

/// A set of instructions that was found to work on this machine.
///
/// There is no way to make one for instructions the machine lacks, so code compiled for [`Isa::kind`] may be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(IsaKind);

/// The sets of instructions code is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsaKind {
    /// AVX-512 F, BW, DQ, VL: 16 lanes, 32 registers.
    Avx512,
    /// AVX2 and FMA: 8 lanes, 16 registers.
    Avx2Fma,
    /// What the compiler assumes of every machine of this architecture: SSE2, NEON.
    Portable,
}

impl Isa {
    /// The best set this machine has.
    pub fn detect() -> Self {
        Self::supported().next().unwrap_or(Self::PORTABLE)
    }

    /// Works everywhere.
    pub const PORTABLE: Self = Self(IsaKind::Portable);

    /// Every set this machine has, best first.
    pub fn supported() -> impl Iterator<Item = Self> {
        [IsaKind::Avx512, IsaKind::Avx2Fma, IsaKind::Portable].into_iter().filter_map(Self::of_kind)
    }

    /// The set `kind`, if this machine has it.
    pub fn of_kind(kind: IsaKind) -> Option<Self> {
        has(kind).then_some(Self(kind))
    }

    /// The kind of these instructions.
    pub fn kind(self) -> IsaKind {
        self.0
    }

    /// Its name in logs.
    pub fn name(self) -> &'static str {
        match self.0 {
            IsaKind::Avx512 => "avx512",
            IsaKind::Avx2Fma => "avx2+fma",
            IsaKind::Portable if cfg!(target_arch = "aarch64") => "neon",
            IsaKind::Portable => "portable",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has(kind: IsaKind) -> bool {
    match kind {
        IsaKind::Avx512 => {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && has(IsaKind::Avx2Fma)
        }
        IsaKind::Avx2Fma => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        IsaKind::Portable => true,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn has(kind: IsaKind) -> bool {
    kind == IsaKind::Portable
}

/// Whether the portable code has a fused multiply-add instruction; elsewhere `f32::mul_add` is a slow library call.
pub const PORTABLE_FMA: bool = cfg!(target_arch = "aarch64");

/// Compiles a function once for each set of instructions and picks the right one by an [`Isa`] in front of the
/// arguments. The body sees `const FMA: bool`: whether [`fma`](crate::math::fma) is one instruction.
///
/// The body and all it calls must be `#[inline(always)]`, or they are compiled for the portable set only. Type parameters
/// come after `FMA`. `SET` gives each set of instructions its own closures: a closure that is called from a single place is
/// inlined, however large, and only then becomes vector code.
///
/// ```
/// ironhorse_cpu::multiversion! {
///     /// x += a y
///     pub fn axpy<const FMA: bool>(x: &mut [f32], a: f32, y: &[f32]) {
///         for (x, y) in x.iter_mut().zip(y) {
///             *x = ironhorse_cpu::math::fma::<FMA>(a, *y, *x);
///         }
///     }
/// }
/// let mut x = [1.0, 2.0];
/// axpy(ironhorse_cpu::isa::Isa::detect(), &mut x, 2.0, &[3.0, 4.0]);
/// assert_eq!(x, [7.0, 10.0]);
/// ```
#[macro_export]
macro_rules! multiversion {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident<const $fma:ident: bool $(, $g:ident: $bound:ident)*>(
        $($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($g: $bound),*>(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)]
            fn body<const $fma: bool, const SET: u8, $($g: $bound),*>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx512<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<true, 2, $($g),*>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            fn avx2<$($g: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                body::<true, 1, $($g),*>($($arg),*)
            }

            match isa.kind() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of this kind exists only where these instructions were detected.
                $crate::isa::IsaKind::Avx512 => unsafe { avx512::<$($g),*>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` of this kind exists only where these instructions were detected.
                $crate::isa::IsaKind::Avx2Fma => unsafe { avx2::<$($g),*>($($arg),*) },
                _ => body::<{ $crate::isa::PORTABLE_FMA }, 0, $($g),*>($($arg),*),
            }
        }
    )*};
}
