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
    RowTiles<BM, BN>(groups, n).each([&](const RowTile& tile) {
        const u64 row = tile.row, column = tile.column;
        const u32 wide = n - tile.column;
        const E* const w = weight + tile.expert * by.step + (ALONG ? column * by.right : column);
        Result acc;
        zero(acc);
        product(acc, Operand<true>{left + row * by.left, by.left, tile.rows}, Operand<ALONG>{w, by.right, wide}, k);
        finish(to + row * by.to + column, by.to, tile.rows, wide, acc, scale, adds);
    });
}

// to[e] (m,n) (+)= scale·Σ_r left[r]ᵀ·right[r] over the rows of each expert.
template <class T, class E>
DEVICE void lora_weights(T* to, const E* left, const E* right, const Groups& groups, u32 m, u32 n, Strides by, float scale,
                         bool adds) {
    WeightTiles<BM, BN>(groups, m, n).each([&](const WeightTile& tile) {
        const auto [expert, row, column] = tile;
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
