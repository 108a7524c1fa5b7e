//! Gradients of the embedding, with positions and with a factor.

use super::*;

#[test]
fn embedding() {
    for positions in [None, Some(&[0, 1, 0, 0, 1, 2])] {
        let mut k = Bench::new("embedding");
        let (out, wte, wpe) = (k.out([2, 3, 4]), k.inp([5, 4]), k.inp([4, 4]));
        let tokens = k.ints([2, 3], &[4, 0, 4, 2, 4, 0]);
        let positions = positions.map(|positions| k.ints([2, 3], positions));
        let (vocab, at_position, factor) = (5, false, 1.0);
        k.b.push(EmbeddingFwd { out, tokens, wte, wpe: Some(wpe), positions, vocab, at_position, factor })
            .unwrap();
        let (d_wte, d_wpe, d_out) = (k.out([5, 4]), k.out([4, 4]), k.weigh(out));
        let (accum_wte, accum) = (Accum::Add, Accum::Write);
        let d_wpe_slot = Some(d_wpe);
        k.backward(EmbeddingBwd {
            d_wte,
            d_wpe: d_wpe_slot,
            d_out,
            tokens,
            positions,
            accum_wte,
            accum,
            factor,
        });
        k.check(Scalars::default(), &[(wte, d_wte), (wpe, d_wpe)]);
    }
}

#[test]
fn embedding_without_positions() {
    for factor in [1.0, 1.5] {
        let mut k = Bench::new("embedding alone");
        let (out, wte) = (k.out([2, 3, 4]), k.inp([5, 4]));
        let tokens = k.ints([2, 3], &[4, 0, 4, 2, 4, 0]);
        let (wpe, positions, vocab, at_position) = (None, None, 5, false);
        k.b.push(EmbeddingFwd { out, tokens, wte, wpe, positions, vocab, at_position, factor }).unwrap();
        let (d_wte, d_out) = (k.inp([5, 4]), k.weigh(out)); // the old contents are overwritten
        let (accum_wte, accum) = (Accum::FirstWrites, Accum::Write);
        k.backward(EmbeddingBwd { d_wte, d_wpe: None, d_out, tokens, positions, accum_wte, accum, factor });
        k.check(Scalars::default(), &[(wte, d_wte)]);
    }
}
