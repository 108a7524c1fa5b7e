/* A classifier trained in C: logits = x W, cross entropy, its gradient, clipping, AdamW.
 *
 *     cargo build --release -p ironhorse-capi
 *     gcc -I crates/capi/include examples/c/train_linear.c -L target/release -Wl,-rpath,"$PWD/target/release" -lironhorse -o train_linear
 *     ./train_linear
 */
#include <stdio.h>
#include <stdlib.h>

#include "ironhorse.h"

enum { ROWS = 64, DIM = 24, CLASSES = 5, STEPS = 200 };

static void check(int32_t code, const char *what) {
    if (code != IH_SUCCESS) {
        fprintf(stderr, "%s: error %d: %s\n", what, (int)code, ih_last_error());
        exit(1);
    }
}

int main(void) {
    static float x[ROWS * DIM], xt[DIM * ROWS], w[DIM * CLASSES], dw[DIM * CLASSES], m[DIM * CLASSES], v[DIM * CLASSES];
    static float logits[ROWS * CLASSES], log_probs[ROWS * CLASSES], d_logits[ROWS * CLASSES];
    static int32_t targets[ROWS], guess[ROWS];
    float loss = 0.0f, first = 0.0f, norm = 0.0f;
    unsigned seed = 7;
    for (int r = 0; r < ROWS; r++) {
        targets[r] = r % CLASSES;
        for (int c = 0; c < DIM; c++) {
            seed = seed * 1664525u + 1013904223u;
            x[r * DIM + c] = (float)(seed >> 8) / (float)(1 << 24) - 0.5f + (c % CLASSES == targets[r] ? 0.5f : 0.0f);
            xt[c * ROWS + r] = x[r * DIM + c];
        }
    }
    check(cuda_zero_grad(w, DIM * CLASSES, NULL), "zero_grad");
    for (int step = 1; step <= STEPS; step++) {
        check(cuda_gemm(x, w, logits, ROWS, CLASSES, DIM, 1.0f, 0.0f, NULL), "logits");
        check(cuda_cross_entropy_forward(logits, targets, &loss, log_probs, ROWS, CLASSES, NULL), "loss");
        check(cuda_cross_entropy_backward(log_probs, targets, d_logits, ROWS, CLASSES, 1.0f / ROWS, NULL), "backward");
        check(cuda_gemm(xt, d_logits, dw, DIM, CLASSES, ROWS, 1.0f, 0.0f, NULL), "gradient");
        check(cuda_grad_clip(dw, NULL, &norm, 1.0f, DIM * CLASSES, NULL), "grad_clip");
        check(cuda_adamw_step(w, dw, m, v, 0.02f, 0.9f, 0.999f, 1e-8f, 0.0f, step, DIM * CLASSES, NULL), "adamw_step");
        if (step == 1) first = loss;
    }
    check(cuda_argmax(logits, guess, ROWS, CLASSES, NULL), "argmax");
    int right = 0;
    for (int r = 0; r < ROWS; r++) right += guess[r] == targets[r];
    printf("loss %.4f to %.4f, %d of %d right\n", first, loss, right, ROWS);
    if (!(loss < 0.5f * first) || right < ROWS * 9 / 10) return 1;
    puts("ok");
    return 0;
}
