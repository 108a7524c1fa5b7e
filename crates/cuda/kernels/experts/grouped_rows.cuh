// The product of rows with their experts' weights, for files that define BM, BN, Operand, Result, zero, product and write.
#pragma once

// out (rows,n) from inp (rows,k) and the experts' weights: (n,k) where ALONG, else (k,n).
template <bool ALONG, class E>
DEVICE void rows_product(E* out, const E* inp, const E* weight, const Groups& groups, u32 n, u32 k) {
    RowTiles<BM, BN>(groups, n).each([&](const RowTile& tile) {
        const u64 row = tile.row, column = tile.column;
        const u32 wide = n - tile.column;
        const E* const w = weight + (u64)tile.expert * n * k + (ALONG ? column * k : column);
        Result acc;
        zero(acc);
        product(acc, Operand<true>{inp + row * k, k, tile.rows}, Operand<ALONG>{w, ALONG ? k : n, wide}, k);
        write(out + row * n + column, n, tile.rows, wide, acc);
    });
}
