// gemm_tf32: d (column-major m by n) (+)= op(a) . op(b) (+ bias), f32 as three products of tf32 each (tf32.cuh)
//
// moves  4*(m*k*n/128 + n*k*m/128) bytes through the caches; bound: tensor cores
// grid   one block of 8 warps per 128 by 128 tile of d and slice of `span` terms, eight tiles along n at a time, so that
//        their operands stay in L2; m, n, k and the distances of rows multiples of 4, addresses of 16 bytes
// order  terms in turn by 32, sums of 32 added by rounded additions; slices go to `parts` and are added in turn by
//        gemm_tf32_sum; no atomics: bitwise repeatable
//
// ALONG_A and ALONG_B say of an operand in memory whether terms lie side by side. Rows of the mma are columns of d (b's), so that
// its neighbours are d's.
#define TERMS 3
#include "tf32.cuh"

constexpr int TILE = 128;
constexpr int DEPTH = 32;  // terms of a stage
constexpr int STAGES = 3;
constexpr int THREADS = 256;
constexpr int MT = 4, NT = 4;              // a warp's part: 64 rows and 32 columns of mma
constexpr u32 BYTES = TILE * DEPTH * 4;    // of an operand's stage
constexpr u32 BAND = 8;                    // tiles along n
constexpr u32 ALONG_PITCH = DEPTH * 4, ACROSS_PITCH = TILE * 4;

// What a lane holds of neighbours in d.
constexpr int WIDE = ALONG_A ? 2 : 4;
struct alignas(4 * WIDE) Neighbours {
    float at[WIDE];
};

extern __shared__ uint4 shared[];

// Where chunks of 16 bytes are: exchanged by row, so that what 8 lanes read is in different banks.
DEVICE u32 along_at(u32 row, u32 chunk) { return row * ALONG_PITCH + (chunk ^ row % 8) * 16; }
DEVICE u32 across_at(u32 term, u32 chunk) { return term * ACROSS_PITCH + (chunk ^ term % 4 * 2) * 16; }

// Starts copying terms from.. of positions first.. of an operand; zeros beyond.
template <bool ALONG> DEVICE void load_tile(u32 to, const float* x, u64 ld, u32 first, u32 count, u32 from, u32 end) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / 4 / THREADS; ++i) {
        u32 n = i * THREADS + threadIdx.x;
        u32 row = ALONG ? n / 8 : n / 32, chunk = ALONG ? n % 8 : n % 32;
        u32 position = first + (ALONG ? row : chunk * 4), term = from + (ALONG ? chunk * 4 : row);
        bool inside = position < count && term < end;
        u64 at = ALONG ? position * ld + term : term * ld + position;
        cp_async16(to + (ALONG ? along_at(row, chunk) : across_at(row, chunk)), x + (inside ? at : 0), inside);
    }
}

// Two tiles of 16 rows from `row` on, terms 8s..: lane (g, t) holds terms t and t+4. Across, of 32 rows the one of tile i, half h
// and place g is 4g + 2i + h.
template <bool ALONG> DEVICE void left(Split<4> (&x)[2], u32 tile, u32 row, int s) {
    if constexpr (ALONG) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            ldmatrix(x[i].big, tile + along_at(row + 16 * i + lane() % 16, 2 * s + lane() / 16));
            x[i].split();
        }
    } else {
        float y[2][4];
        u32 chunk = row / 4 + lane() / 4, term = 8 * s + lane() % 4;
        read(y[0], tile + across_at(term, chunk));
        read(y[1], tile + across_at(term + 4, chunk));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i / 4].set(i % 4, y[i % 4 / 2][i / 4 * 2 + i % 2]);
    }
}

// Four tiles of 8 columns from `column` on. Across, of 32 columns the one of tile j and place g is 4g + j.
template <bool ALONG> DEVICE void right(Split<2> (&x)[NT], u32 tile, u32 column, int s) {
    if constexpr (ALONG) {
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            u32 y[4];
            ldmatrix(y, tile + along_at(column + 8 * j + lane() % 8 + lane() / 16 * 8, 2 * s + lane() / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; ++i) x[j + i / 2].set(i % 2, __uint_as_float(y[i]));
        }
    } else {
        float y[2][4];
        u32 chunk = column / 4 + lane() / 4, term = 8 * s + lane() % 4;
        read(y[0], tile + across_at(term, chunk));
        read(y[1], tile + across_at(term + 4, chunk));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i / 2].set(i % 2, y[i % 2][i / 2]);
    }
}

// `parts`, where not null, takes the product of each slice instead of d. bias, one for each of m, may be null.
KERNEL __launch_bounds__(THREADS, 1)
    gemm_tf32(float* d, float* parts, const float* a, const float* b, const float* bias, u32 m, u32 n, u32 k, u64 lda, u64 ldb,
              u32 span, u32 adds) {
    u32 tiles_m = (m + TILE - 1) / TILE, tiles_n = (n + TILE - 1) / TILE, tiles = tiles_m * tiles_n;
    u32 slice = blockIdx.x / tiles, block = blockIdx.x % tiles;
    u32 band = block / (BAND * tiles_m) * BAND, rest = block % (BAND * tiles_m), high = min(BAND, tiles_n - band);
    u32 n0 = (band + rest % high) * TILE, m0 = rest / high * TILE;
    u32 warp = threadIdx.x / WARP, row = warp / 4 * 64, column = warp % 4 * 32;
    u32 base = shared_address(shared), first = slice * span, end = min(k, first + span);
    u32 steps = (end - first + DEPTH - 1) / DEPTH;
    auto pass = [&](u32 i) {
        if (i < steps) {
            u32 to = base + i % STAGES * 2 * BYTES, from = first + i * DEPTH;
            load_tile<ALONG_B>(to, b, ldb, n0, n, from, end);
            load_tile<ALONG_A>(to + BYTES, a, lda, m0, m, from, end);
        }
        cp_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) pass(i);

    float acc[MT][NT][4] = {};
    for (u32 i = 0; i < steps; ++i) {
        cp_wait<STAGES - 2>();
        __syncthreads();  // this stage is here, and all are done with the one before, whose place the next copies take
        pass(i + STAGES - 1);
        u32 rows = base + i % STAGES * 2 * BYTES, columns = rows + BYTES;
        float part[MT][NT][4] = {};
#pragma unroll 2
        for (int s = 0; s < DEPTH / 8; ++s) {
            Split<2> y[NT];
            right<ALONG_A>(y, columns, column, s);
#pragma unroll
            for (int pair = 0; pair < MT; pair += 2) {
                Split<4> x[2];
                left<ALONG_B>(x, rows, row + 16 * pair, s);
#pragma unroll
                for (int j = 0; j < 2 * NT; ++j) chain(part[pair + j / NT][j % NT], x[j / NT], y[j % NT]);
            }
        }
#pragma unroll
        for (int e = 0; e < MT * NT * 4; ++e) acc[e / 16][e / 4 % 4][e % 4] += part[e / 16][e / 4 % 4][e % 4];
    }

    float* to = parts == nullptr ? d : parts + (u64)slice * m * n;
    u32 g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
        u32 at = n0 + row + (ALONG_B ? 8 * i + g : i / 4 * 32 + 4 * g + i % 4);
        if (at >= n) continue;
#pragma unroll
        for (int j = 0; j < 8 / WIDE; ++j) {
            u32 c = m0 + column + (ALONG_A ? 8 * j + 2 * t : 8 * t + 4 * j);
            if (c >= m) continue;
            Neighbours* place = reinterpret_cast<Neighbours*>(to + (u64)at * m + c);
            Neighbours x, old;
            if (adds) old = *place;
#pragma unroll
            for (int e = 0; e < WIDE; ++e) {
                x.at[e] = ALONG_A ? acc[i / 2][j][i % 2 * 2 + e] : acc[i / 2][e][i % 2 * 2 + j % 2];
                if (bias != nullptr) x.at[e] += bias[c + e];
                if (adds) x.at[e] += old.at[e];
            }
            *place = x;
        }
    }
}

// d (+)= the sum of `slices` parts of `count` elements
// moves  4*(slices + 1)*count bytes; bound: memory
// grid   a thread for every four elements, 256 to a block
// order  slices in turn
KERNEL __launch_bounds__(256) gemm_tf32_sum(float* d, const float* parts, u64 count, u32 slices, u32 adds) {
    u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * 4;
    if (at >= count) return;
    Vec<float> sum = load(parts + at);
    for (u32 i = 1; i < slices; ++i) {
        Vec<float> x = load(parts + i * count + at);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.at[e] += x.at[e];
    }
    if (adds) {
        Vec<float> x = load(d + at);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.at[e] += x.at[e];
    }
    store(d + at, sum);
}
