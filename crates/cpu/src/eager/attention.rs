//! Attention, and its gradients.

use super::process_team::{ProcessTeam, with_team};
use super::{Failed, Run, Span, by_type};
use crate::element::{Elem, Real};
use crate::kernel::attention::{Backward, FEW, Forward, Heads, QueryScratch, Reach, TileScratch, one_query};
use crate::team::{PerWorker, Split};
use ironhorse_core::Operands;
use ironhorse_core::eager::{Array, Attention, AttentionBwd, AttentionShape, Strides};

/// Multiply-adds below which waking threads costs more than it gains.
const WORTH_IT: usize = 1 << 18;

fn is_large(a: &AttentionShape) -> bool {
    [a.batch, a.heads, a.q_len, a.kv_len].iter().fold(a.head_dim, |x, &y| x.saturating_mul(y)) >= WORTH_IT
}

/// The window of an array of heads: up to its last element.
///
/// # Safety
/// The array has these sizes.
unsafe fn window<T: Elem>(a: Array, s: Strides, [batch, heads, len, head_dim]: [usize; 4]) -> Span<T> {
    let last = |count: usize, stride: usize| count.saturating_sub(1) * stride;
    let end = last(batch, s.batch) + last(heads, s.head) + last(len, s.position) + head_dim;
    let empty = batch * heads * len == 0;
    // SAFETY: guaranteed by the caller.
    unsafe { Span::of(a, if empty { 0 } else { end }) }
}

/// The windows of a forward, and of what has the layout of its arrays.
struct Windows(AttentionShape);

impl Windows {
    fn of_queries(&self) -> [usize; 4] {
        [self.0.batch, self.0.heads, self.0.q_len, self.0.head_dim]
    }

    fn of_keys(&self) -> [usize; 4] {
        [self.0.batch, self.0.kv_heads, self.0.kv_len, self.0.head_dim]
    }

    /// # Safety
    /// The arrays have these sizes.
    unsafe fn forward<T: Elem>(&self, [q, k, v, out, lse]: [Array; 5]) -> Forward<T> {
        let a = &self.0;
        // SAFETY: guaranteed by the caller.
        unsafe {
            Forward {
                shape: Heads(*a, Operands::F32),
                q: window(q, a.q, self.of_queries()),
                k: window(k, a.k, self.of_keys()),
                v: window(v, a.v, self.of_keys()),
                out: window(out, a.out, self.of_queries()),
                lse: Span::of(lse, a.batch * a.heads * a.q_len),
                drops: None,
                reach: Reach::ALL,
            }
        }
    }
}

impl Run for Attention {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (a, isa) = (&self.shape, ProcessTeam.isa());
        let heads = a.batch * a.heads;
        if heads * a.q_len * a.head_dim == 0 {
            return Ok(());
        }
        by_type!(self.q.float, T => {
            type Acc = <T as Elem>::Acc;
            // SAFETY: guaranteed by the caller of `run`.
            let call = unsafe { Windows(*a).forward::<T>([self.q, self.k, self.v, self.out, self.lse]) };
            with_team(is_large(a), |team, _| {
                if a.q_len <= FEW {
                    let room = PerWorker::new(team, |_| QueryScratch::<Acc>::new(a.kv_len, a.head_dim));
                    return team.chunks(heads * a.q_len, 1, |task, worker| {
                        let at = [task.start / a.q_len, task.start % a.q_len];
                        // SAFETY: the team runs one task at a time per worker, and the memory belongs to this run; tasks own
                        // disjoint rows of what is written.
                        unsafe { one_query(isa, room.get(worker), &call, at) }
                    });
                }
                let scratch = PerWorker::new(team, |_| TileScratch::new::<T>(isa, &call.shape));
                team.chunks(heads * call.shape.tiles(), 1, |task, worker| {
                    // SAFETY: the team runs one task at a time per worker, and tasks own disjoint rows of what is written.
                    unsafe { call.tile(isa, scratch.get(worker), task.start) }
                })
            })?;
        });
        Ok(())
    }
}

impl Run for AttentionBwd {
    unsafe fn run(&self) -> Result<(), Failed> {
        let (a, isa) = (&self.shape, ProcessTeam.isa());
        if a.batch * a.heads * a.head_dim == 0 {
            return Ok(());
        }
        by_type!(self.q.float, T => {
            // SAFETY: guaranteed by the caller of `run`.
            let call = unsafe {
                let windows = Windows(*a);
                let from = windows.forward::<T>([self.q, self.k, self.v, self.out, self.lse]);
                let d_out = window(self.d_out, a.out, windows.of_queries());
                let d_q = window(self.d_q, a.q, windows.of_queries());
                let [d_k, d_v] = [(self.d_k, a.k), (self.d_v, a.v)].map(|(d, s)| window(d, s, windows.of_keys()));
                Backward { from, d_out, d_q, d_k, d_v }
            };
            let mut own = vec![Real::of(0.0); call.own_elements()];
            let own = Span::of_slice(&mut own);
            with_team(is_large(a), |team, _| {
                let scratch = PerWorker::new(team, |_| TileScratch::new::<T>(isa, &call.from.shape));
                // SAFETY: guaranteed by the caller of `run`; the memory belongs to this run.
                unsafe { call.heads((team, isa), &scratch, own) }
            })?;
            if !own.is_empty() {
                // SAFETY: all heads are done.
                unsafe { call.gather(&ProcessTeam, own) }?;
            }
        });
        Ok(())
    }
}
