//! Gradients through documents and windows.

use super::*;

#[test]
fn attention_of_documents_and_windows() {
    let documents = [0, 1, 2, 0, 1, 0, 0, 0, 1, 2, 3, 4, 5, 6];
    for (documents, window) in [(Some(&documents), None), (None, Some(3)), (Some(&documents), Some(2))] {
        let mut k = Bench::new("masked attention");
        let (out, lse, qkv) = (k.out([2, 7, 6]), k.out([2, 2, 7]), k.inp([2, 7, 12]));
        let positions = documents.map(|positions| k.ints([2, 7], positions));
        let (mask, heads, kv_heads) = (AttentionMask { positions, window }, 2, 1);
        k.b.push(AttentionFwd { out, lse, qkv, heads, kv_heads, mask }).unwrap();
        let (d_qkv, d_out) = (k.out([2, 7, 12]), k.weigh(out));
        k.backward(AttentionBwd { d_qkv, d_out, qkv, out, lse, heads, kv_heads, mask });
        k.check(Scalars::default(), &[(qkv, d_qkv)]);
    }
}
