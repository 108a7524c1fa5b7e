//! Rotary position embedding.

use super::process_team::ProcessTeam;
use super::{Failed, Run, Span, by_type};
use crate::element::{Elem, Real};
use crate::kernel::elementwise::{narrow, widen};
use crate::kernel::rope::rotate;
use crate::kernel::trig::sin_cos_slice;
use crate::team::Split;
use ironhorse_core::eager::{Rope, RopeAngles, RopeFreqs, RopeQk};

impl Run for Rope {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, s, back) = (ProcessTeam.isa(), self.shape, self.back);
        let (half, width, tokens) = (s.head_dim / 2, s.heads * s.head_dim, s.batch * s.seq);
        if half == 0 || width == 0 || !self.y.is_some() {
            return Ok(());
        }
        by_type!(self.x.float, T => {
            type Acc = <T as Elem>::Acc;
            // SAFETY: guaranteed by the caller of `run`.
            let ([x, y], [cos, sin]) = unsafe {
                let tables = [self.cos, self.sin].map(|a| Span::<Acc>::of(a, s.seq * half));
                ([self.x, self.y].map(|a| Span::<T>::of(a, tokens * width)), tables)
            };
            let rows = ((1 << 15) / width).max(1);
            ProcessTeam.pieces(tokens, rows, 2 * width, |tokens| {
                let mut token = vec![Acc::ZERO; width];
                for t in tokens {
                    // SAFETY: guaranteed by the caller of `run`; tokens have one task each and are read before they are written.
                    unsafe {
                        let angles = [cos, sin].map(|x| x.row(t % s.seq, half).all());
                        widen(isa, &mut token, x.row(t, width).all());
                        rotate(isa, s.pairs, &mut token, angles, back);
                        narrow(isa, y.row(t, width).all_mut(), &token);
                    }
                }
            })?;
        });
        Ok(())
    }
}

impl Run for RopeAngles {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (isa, s, offset) = (ProcessTeam.isa(), self.shape, self.offset);
        let (half, width) = (s.head_dim / 2, s.heads * s.head_dim);
        let n = s.batch * s.seq * width;
        if n == 0 {
            return Ok(());
        }
        // SAFETY: guaranteed by the caller of `run`.
        let ([x, y], angles) = unsafe {
            let angles = Span::from_raw(self.angles.cast_mut(), (offset + s.seq) * half);
            ([self.x, self.y].map(|a| Span::<f32>::of(a, n)), angles)
        };
        ProcessTeam.pieces(s.seq, 8, s.batch * width * 6, |positions| {
            let (mut sin, mut cos) = (vec![0.0; half], vec![0.0; half]);
            for t in positions {
                // SAFETY: nobody writes the angles.
                sin_cos_slice(&mut sin, &mut cos, unsafe { angles.row(offset + t, half).all() });
                for token in (0..s.batch).map(|b| b * s.seq + t) {
                    let (x, y) = (x.row(token, width), y.row(token, width));
                    // SAFETY: tokens have one task each; `y` is `x` or shares no memory with it.
                    unsafe {
                        x.ptr().copy_to(y.ptr(), width);
                        rotate(isa, s.pairs, y.all_mut(), [&cos, &sin], false);
                    }
                }
            }
        })?;
        Ok(())
    }
}

impl Run for RopeQk {
    unsafe fn run(&self) -> Result<(), Failed> {
        // SAFETY: guaranteed by the caller of `run`.
        unsafe { self.q.run().and_then(|()| self.k.run()) }
    }
}

impl Run for RopeFreqs {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (half, d) = (self.head_dim / 2, self.head_dim as f64);
        let steps: Vec<f64> = (0..half).map(|i| 1.0 / self.base.powf(2.0 * i as f64 / d)).collect();
        // SAFETY: guaranteed by the caller of `run`.
        let freqs = unsafe { Span::from_raw(self.freqs, self.positions * half) };
        let positions = if half == 0 { 0 } else { self.positions };
        ProcessTeam.rows(positions, half, 1, |p| {
            // SAFETY: positions have one task each.
            let row = unsafe { freqs.row(p, half).all_mut() };
            row.iter_mut().zip(&steps).for_each(|(angle, step)| *angle = (p as f64 * step) as f32);
        })?;
        Ok(())
    }
}
