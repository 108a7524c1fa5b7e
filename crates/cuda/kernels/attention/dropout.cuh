// Dropout of the probabilities of attention on tensor cores: row B*NH*T of the mask is that of a query, its column that of a
// key. A lane holds both columns of each random word, 8 apart, whether its rows are queries or keys.
//
// MT and the layout of scores are those of attention/tile_half.cuh.
#pragma once

// Calls f(m, n, e, whether it is kept) for each of a lane's scores s[m][n][e], where rows are queries; `row` is the mask's of the warp's first
// query, `key` the first key, a multiple of 16.
template <int N, class F> DEVICE void each_kept(const Drops& drops, u64 row, u32 key, F f) {
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
        int m = i / 2, h = i % 2 * 2;
        DropRow mask = drops.row(row + 16 * m + row_of(h));
#pragma unroll
        for (int n = 0; n < N / 8; n += 2)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                u32 word = mask.word(key / 2 + 4 * n + column_of(c));
                f(m, n, h + c, drops.keeps_low(word));
                f(m, n + 1, h + c, drops.keeps_high(word));
            }
    }
}

// Clears the weights of dropped keys.
template <int N> DEVICE void drop(float (&s)[MT][N / 8][4], const Drops& drops, u64 row, u32 key) {
    each_kept<N>(drops, row, key, [&](int m, int n, int e, bool keeps) {
        if (!keeps) s[m][n][e] = 0.0f;
    });
}

// A bit for each of a lane's scores, set where it is kept: bit 4*(m*N/8 + n) + e of s[m][n][e]. `query` is the mask's row of the
// first query, `key` the first key; where rows are keys (KEYS), both are of the tile's first row and column.
template <int N, bool KEYS> DEVICE u32 kept(const Drops& drops, u64 query, u32 key) {
    static_assert(MT * N / 2 <= 32, "a bit per score");
    u32 bits = 0;
    auto set = [&](int m, int n, int e, bool keeps) { bits |= (u32)keeps << (4 * (m * (N / 8) + n) + e); };
    if constexpr (KEYS) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                DropRow mask = drops.row(query + 8 * n + column_of(c));
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    u32 word = mask.word(key / 2 + 8 * m + row_of(0));
                    set(m, n, c, drops.keeps_low(word));
                    set(m, n, c + 2, drops.keeps_high(word));
                }
            }
    } else {
        each_kept<N>(drops, query, key, set);
    }
    return bits;
}
