// The product of rows with their experts' weights, for files that define BM, BN, Operand, Result, zero, product and write.
#pragma once

// out (rows,n) from inp (rows,k) and the experts' weights: (n,k) where ALONG, else (k,n).
template <bool ALONG, class E>
DEVICE void rows_product(E* out, const E* inp, const E* weight, const Groups& groups, u32 n, u32 k) {
    const u32 columns = (n + BN - 1) / BN;
    for (u64 t = blockIdx.x; t < (u64)groups.tiles * columns; t += gridDim.x) {
        const Tile tile = groups.tile(t, columns);
        const u32 inside = tile.row * BM, column = tile.column * BN;
        const u64 row = groups.first(tile.expert) + inside;
        const u32 tall = groups.rows(tile.expert) - inside, wide = n - column;
        const E* const w = weight + (u64)tile.expert * n * k + (ALONG ? (u64)column * k : (u64)column);
        Result acc;
        zero(acc);
        product(acc, Operand<true>{inp + row * k, k, tall}, Operand<ALONG>{w, ALONG ? k : n, wide}, k);
        write(out + row * n + column, n, tall, wide, acc);
    }
}
