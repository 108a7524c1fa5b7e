/* One attention layer in C: RMS norm, projections, rotary embedding, causal attention with grouped heads, residual, and
 * the next token.
 *
 *     cargo build --release -p ironhorse-capi
 *     gcc -I crates/capi/include examples/c/attention_block.c -L target/release -Wl,-rpath,"$PWD/target/release" -lironhorse -lm -o attention_block
 *     ./attention_block
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ironhorse.h"

enum { SEQ = 37, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16, DIM = HEADS * HEAD_DIM, KV_DIM = KV_HEADS * HEAD_DIM, VOCAB = 101 };

static void check(int32_t code, const char *what) {
    if (code != IH_SUCCESS) {
        fprintf(stderr, "%s: error %d: %s\n", what, (int)code, ih_last_error());
        exit(1);
    }
}

static float *filled(size_t n, unsigned seed) {
    float *x = malloc(n * sizeof *x);
    if (x == NULL) exit(2);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = ((float)(seed >> 8) / (float)(1 << 23) - 1.0f) * 0.2f;
    }
    return x;
}

int main(void) {
    printf("ironhorse %s\n", ih_version());
    float *x = filled(SEQ * DIM, 1), *normed = filled(SEQ * DIM, 2), *gain = filled(DIM, 3);
    float *wq = filled(DIM * DIM, 4), *wk = filled(DIM * KV_DIM, 5), *wv = filled(DIM * KV_DIM, 6);
    float *q = filled(SEQ * DIM, 7), *k = filled(SEQ * KV_DIM, 8), *v = filled(SEQ * KV_DIM, 9);
    float *freqs = filled(SEQ * HEAD_DIM / 2, 10), *out = filled(SEQ * DIM, 11);
    float *head = filled(DIM * VOCAB, 12), *logits = filled(SEQ * VOCAB, 13);
    int32_t token = -1, drawn = -1;
    const uint64_t seed = 42;

    check(cuda_rmsnorm(x, gain, normed, SEQ, DIM, 1e-5f, NULL), "rmsnorm");
    check(cuda_gemm(normed, wq, q, SEQ, DIM, DIM, 1.0f, 0.0f, NULL), "q");
    check(cuda_gemm(normed, wk, k, SEQ, KV_DIM, DIM, 1.0f, 0.0f, NULL), "k");
    check(cuda_gemm(normed, wv, v, SEQ, KV_DIM, DIM, 1.0f, 0.0f, NULL), "v");
    check(cuda_rope_freqs(freqs, SEQ, HEAD_DIM, 10000.0f, 1.0f, NULL), "rope_freqs");
    check(cuda_rope_qk(q, k, freqs, q, k, 1, SEQ, HEADS, KV_HEADS, HEAD_DIM, 0, NULL), "rope_qk");
    check(cuda_attention(q, k, v, out, 1, SEQ, SEQ, HEADS, KV_HEADS, HEAD_DIM, 1.0f / sqrtf(HEAD_DIM), 1, NULL),
          "attention");
    check(cuda_add(x, out, out, SEQ * DIM, NULL), "add");
    check(cuda_gemm(out, head, logits, SEQ, VOCAB, DIM, 1.0f, 0.0f, NULL), "head");
    const float *last = logits + (SEQ - 1) * VOCAB;
    check(cuda_argmax(last, &token, 1, VOCAB, NULL), "argmax");
    check(cuda_topp_sample(last, &drawn, &seed, 1, VOCAB, 0.9f, 0.8f, NULL), "topp_sample");
    printf("most likely %d, drawn %d\n", (int)token, (int)drawn);

    /* The first position attends only to itself, so the result of attention is its value. */
    for (int h = 0; h < HEADS; h++) {
        for (int i = 0; i < HEAD_DIM; i++) {
            float want = x[h * HEAD_DIM + i] + v[h / (HEADS / KV_HEADS) * HEAD_DIM + i];
            if (fabsf(out[h * HEAD_DIM + i] - want) > 1e-5f) {
                fprintf(stderr, "head %d, element %d: %g, expected %g\n", h, i, out[h * HEAD_DIM + i], want);
                return 1;
            }
        }
    }
    float *all[] = {x, normed, gain, wq, wk, wv, q, k, v, freqs, out, head, logits};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    if (token < 0 || token >= VOCAB || drawn < 0 || drawn >= VOCAB) return 1;
    puts("ok");
    return 0;
}
