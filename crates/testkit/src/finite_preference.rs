//! The gradient of the loss of pairs with respect to logits.

use super::*;

/// Three pairs in two sequences: tokens that are ignored, texts of different lengths, one that is empty, and rows of no pair.
#[test]
fn preference() {
    let mut k = Bench::new("preference");
    let (logits, vocab) = (k.inp([2, 6, 5]), 4);
    let targets = k.ints([2, 6], &[-100, 2, 0, 1, -100, 3, 3, 0, 1, 1, 2, 0]);
    let pairs = k.ints([4, 3], &[0, 2, 5, 6, 7, 9, 9, 11, 11, 11, 11, 11]);
    let reference = k.inp([2, 6]);
    let (losses, weights, loss) = (k.out([2, 6]), k.out([2, 6]), k.out([]));
    let (means, rewards, d_logits) = (k.out([3]), k.out([4, 2]), k.out([2, 6, 5]));
    k.b.push(CrossEntropy { losses, logits, targets, vocab, grad: false }).unwrap();
    let (beta, accum) = (0.7, Accum::Write);
    let weights_of = Some(weights);
    k.b.push(Preference { loss, means, rewards, weights: weights_of, losses, reference, pairs, beta, accum })
        .unwrap();
    k.functional.push((loss, vec![1.0]));
    k.backward(CopySlot { out: d_logits, inp: logits });
    k.backward(CrossEntropyBwd { logits: d_logits, targets, losses, weights, vocab });
    k.check(Scalars { loss_scale: 1.0 / 3.0, ..Scalars::default() }, &[(logits, d_logits)]);
}
