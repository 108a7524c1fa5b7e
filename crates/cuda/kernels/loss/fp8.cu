// cross_entropy_quantize: q = fp8(g·s) of the gradient g of logits (rows,cols), in rows and in columns, from what cross_entropy_sums of
//                  loss/cross_entropy.cu has left of each row in `of_rows`. The gradient is rounded to bf16 on the way: the same bits
//                  as cross_entropy_shared and then `quantize` of fp8/quantize.cu. The logits stay as they are
// moves  rows·cols·(sizeof(ACT) + 2) bytes; bound: memory
// grid   (ceil(cols / 128), ceil(rows / 128)) of 256 threads, 8 by 8 elements each; needs rows % 16 == 0 and cols % 16 == 0
// order  no sums; the maximum has no order
#include "fp8/tile.cuh"
#include "loss/gradient.cuh"

static_assert(N == SIDE, "a vector to a row of a thread");

struct Row {
    Scales scales;
    i32 target;
};

struct Gradients {
    const ACT* logits;
    const i32* targets;
    const Scales* of_rows;
    u32 rows, cols, vocab;
    Row* shared;  // of the rows of the tile
    Square x;
    u32 first;

    DEVICE void fetch(u32 row, u32 col) {
        x.fetch(logits + (u64)row * cols + col, cols);
        first = col;
    }
    DEVICE void prepare() {
        const u32 row = blockIdx.y * TILE + threadIdx.x;
        if (threadIdx.x < TILE && row < rows) {
            const i32 target = targets[row];
            shared[threadIdx.x] = {of_rows[row], (u32)target < vocab ? target : -1};
        }
        __syncthreads();
    }
    DEVICE void row(float (&out)[SIDE], int r) const {
        float logit[SIDE];
        x.row(logit, r);
        const Row& here = shared[threadIdx.x / ACROSS * SIDE + r];
        gradients(out, logit, first, here.target, vocab, here.scales);
#pragma unroll
        for (int c = 0; c < SIDE; c++) out[c] = to_float(from_float<ACT>(out[c]));
    }
};

KERNEL __launch_bounds__(2 * TILE, 4)
    cross_entropy_quantize(u8* q, u8* q_t, float* inverse, u32* seen, const u32* amax, const ACT* logits, const i32* targets,
                           const Scales* of_rows, u32 rows, u32 cols, u32 vocab, int margin, int unknown) {
    __shared__ Row of_tile[TILE];
    quantize_tile<false>({q, q_t, inverse, seen, nullptr, amax, rows, cols, margin, unknown},
                         Gradients{logits, targets, of_rows, rows, cols, vocab, of_tile});
}
