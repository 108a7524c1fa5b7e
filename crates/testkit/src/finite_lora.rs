//! Gradients of adapters, and of the input that they share with their layer.

use super::*;

/// q and v of a product of 9 columns, in rank 2: the middle columns have no adapter.
#[test]
fn lora() {
    let mut k = Bench::new("lora");
    let parts = LoraParts::new(&[0..4, 6..9]).unwrap();
    let (inp, weight, a, b) = (k.inp([2, 3, 5]), k.inp([9, 5]), k.inp([4, 5]), k.inp([7, 2]));
    let (out, hidden, scale) = (k.out([2, 3, 9]), k.out([2, 3, 4]), 1.5);
    k.b.push(LinearFwd { out, pre: None, inp, weight, bias: None }).unwrap();
    k.b.push(LinearFwd { out: hidden, pre: None, inp, weight: a, bias: None }).unwrap();
    k.b.push(LoraFwd { out, hidden, b, parts, scale }).unwrap();
    let (d_inp, d_a, d_b, d_hidden) = (k.out([2, 3, 5]), k.out([4, 5]), k.out([7, 2]), k.out([2, 3, 4]));
    let (d_out, accum) = (k.weigh(out), Accum::Write);
    k.backward(LinearBwdInput { d_inp, d_out, weight, pre: None });
    k.backward(LoraBwdWeight { d_b, d_out, hidden, parts, scale, accum });
    k.backward(LoraBwdHidden { d_hidden, d_out, b, parts, scale });
    k.backward(LinearBwdWeight { d_weight: d_a, d_bias: None, d_out: d_hidden, inp, accum });
    k.backward(LoraBwdInput { d_inp, d_hidden, a });
    k.check(Scalars::default(), &[(inp, d_inp), (a, d_a), (b, d_b)]);
}
