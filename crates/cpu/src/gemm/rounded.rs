//! Products of bf16 operands where no instruction multiplies them: packing rounds, and f32 kernels multiply. No faster than f32, but
//! what a machine with such instructions computes, up to the order of sums.

use super::kernel::{Kernels, Pack, Packing};
use super::portable;
#[cfg(target_arch = "x86_64")]
use super::x86;
use ironhorse_core::{bf16_to_f32, f32_to_bf16};

/// The same kernels behind panels that are rounded.
macro_rules! rounded {
    ($name:ident, $of:path) => {
        pub(super) static $name: Kernels = {
            unsafe fn pack_a(p: &Packing) {
                // SAFETY: guaranteed by the caller.
                unsafe { pack($of.pack_a, $of.mr, p) };
            }

            unsafe fn pack_b(p: &Packing) {
                // SAFETY: guaranteed by the caller.
                unsafe { pack($of.pack_b, $of.nr, p) };
            }

            Kernels { pack_a, pack_b, low: &[], ..$of }
        };
    };
}

#[cfg(target_arch = "x86_64")]
rounded!(AVX512, x86::AVX512);
#[cfg(target_arch = "x86_64")]
rounded!(AVX2, x86::AVX2);
rounded!(PORTABLE, portable::KERNELS);

/// # Safety
/// As `pack`, into panels of `width`.
unsafe fn pack(pack: Pack, width: usize, p: &Packing) {
    // SAFETY: guaranteed by the caller: all of these floats are written.
    let panels = unsafe {
        pack(p);
        std::slice::from_raw_parts_mut(p.dst, p.count.next_multiple_of(width) * p.k)
    };
    for value in panels {
        *value = bf16_to_f32(f32_to_bf16(*value));
    }
}
