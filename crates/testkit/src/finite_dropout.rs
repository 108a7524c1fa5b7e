//! Gradients of dropout: with the mask fixed, a loss is a smooth function.

use super::Bench;
use ironhorse_core::op::{AttentionDropoutBwd, AttentionDropoutFwd, AttentionMask, Dropout};
use ironhorse_core::{DropRate, DropSite, Scalars};

fn half() -> DropSite {
    DropSite { rate: DropRate::new(0.5).unwrap(), site: 4 }
}

#[test]
fn dropout() {
    for shape in [[3, 5], [2, 16], [4, 33]] {
        let mut k = Bench::new("dropout");
        let (out, inp) = (k.out(shape), k.inp(shape));
        k.b.push(Dropout { out, inp, drop: half() }).unwrap();
        let (d_inp, d_out) = (k.out(shape), k.weigh(out));
        k.backward(Dropout { out: d_inp, inp: d_out, drop: half() });
        k.check(Scalars { seed: 3, step: 9, micro_step: 2, ..Scalars::default() }, &[(inp, d_inp)]);
    }
}

#[test]
fn attention_dropout() {
    for [seq, width, heads, kv_heads] in [[1, 3, 1, 1], [7, 6, 2, 2], [18, 4, 2, 1]] {
        let packed = width + 2 * (width / heads * kv_heads);
        let mut k = Bench::new("attention dropout");
        let (out, lse) = (k.out([2, seq, width]), k.out([2, heads, seq]));
        let qkv = k.inp([2, seq, packed]);
        k.b.push(AttentionDropoutFwd {
            out,
            lse,
            qkv,
            heads,
            kv_heads,
            mask: AttentionMask::CAUSAL,
            drop: half(),
        })
        .unwrap();
        let (d_qkv, d_out) = (k.out([2, seq, packed]), k.weigh(out));
        k.backward(AttentionDropoutBwd {
            d_qkv,
            d_out,
            qkv,
            out,
            lse,
            heads,
            kv_heads,
            mask: AttentionMask::CAUSAL,
            drop: half(),
        });
        k.check(Scalars { seed: 3, step: 9, micro_step: 2, ..Scalars::default() }, &[(qkv, d_qkv)]);
    }
}
