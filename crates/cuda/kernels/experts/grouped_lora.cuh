// Adapters of experts, on some columns of their rows, for files that define BM, BN, Operand, Result, zero, product and
// `finish(to, stride, rows, columns, acc, scale, adds)`, which stores to (+)= scale·acc.
#pragma once

// Matrices by the elements from one row to the next: of the result, of the left and of the right operand. `step` is that from
// one expert's weight to the next.
struct Strides {
    u32 to, left, right;
    u64 step;
};

// to (rows,n) (+)= scale·left·w[e], of left (rows,k) and the experts' weights w: (n,k), transposed, where ALONG, else (k,n).
template <bool ALONG, class E>
DEVICE void lora_rows(E* to, const E* left, const E* weight, const Groups& groups, u32 n, u32 k, Strides by, float scale,
                      bool adds) {
    const u32 columns = (n + BN - 1) / BN;
    for (u64 t = blockIdx.x; t < (u64)groups.tiles * columns; t += gridDim.x) {
        const Tile tile = groups.tile(t, columns);
        const u32 inside = tile.row * BM, column = tile.column * BN;
        const u64 row = groups.first(tile.expert) + inside;
        const u32 tall = groups.rows(tile.expert) - inside, wide = n - column;
        const E* const w = weight + tile.expert * by.step + (ALONG ? (u64)column * by.right : (u64)column);
        Result acc;
        zero(acc);
        product(acc, Operand<true>{left + row * by.left, by.left, tall}, Operand<ALONG>{w, by.right, wide}, k);
        finish(to + row * by.to + column, by.to, tall, wide, acc, scale, adds);
    }
}

// to[e] (m,n) (+)= scale·Σ_r left[r]ᵀ·right[r] over the rows of each expert.
template <class T, class E>
DEVICE void lora_weights(T* to, const E* left, const E* right, const Groups& groups, u32 m, u32 n, Strides by, float scale,
                         bool adds) {
    each_weight_tile<BM, BN>(groups, m, n, [&](u32 expert, u32 row, u32 column) {
        const u64 first = groups.first(expert);
        const u32 terms = groups.rows(expert);
        if (terms == 0 && adds) return;
        Result acc;
        zero(acc);
        product(acc, Operand<false>{left + first * by.left + row, by.left, m - row},
                Operand<false>{right + first * by.right + column, by.right, n - column}, terms);
        finish(to + expert * by.step + (u64)row * by.to + column, by.to, m - row, n - column, acc, scale, adds);
    });
}
