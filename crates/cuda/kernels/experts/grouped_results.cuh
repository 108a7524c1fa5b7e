// What the consumers of the experts' products on Hopper do with a tile of results: rounded to bf16 and stored by TMA, or in f32 from
// registers; alone, or added to what is there; and the sum of their squares where the norm of the gradients is wanted. A file that includes this defines what grouped_hopper.cuh asks for, and OUT, the type of
// the gradient of weights.
#pragma once

#include "experts/grouped_hopper.cuh"
#include "optimizer/squares.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
struct Unseen {
    DEVICE void operator()(const u32 (&)[8][2]) const {}
};

// The part of the tile at column x, row y that exists: `rows` and `columns`. `seen(pairs)` is called with each 64 columns of it, while they
// are on their way out.
template <int J = 0, class F = Unseen>
DEVICE void write(ResultStores& stores, const Target& to, u32 x, u32 y, u32 rows, u32 columns, const float (&acc)[128], F seen = {}) {
    if constexpr (J < BN / BK) {
        u32 pairs[8][2];
        rounded<J>(pairs, acc);
        if (J * BK < columns) {
            stores.write(to, x + J * BK, y + own_rows(), (i32)rows - (i32)own_rows(), pairs);
            seen(pairs);
        }
        write<J + 1>(stores, to, x, y, rows, columns, acc, seen);
    }
}

// The sum of the squares of a thread's 32 of 64 columns, in f32: 8 at a time, then these; WIDE: in f64.
template <bool WIDE> DEVICE double squares_of(const u32 (&pairs)[8][2]) {
    double sum = 0.0;
    float few[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const u32 pair = pairs[i / 2][i % 2];
        const float a = low(pair), b = high(pair);
        if constexpr (WIDE) sum += (double)a * (double)a + (double)b * (double)b;
        else few[i / 4] = __fmaf_rn(b, b, __fmaf_rn(a, a, few[i / 4]));
    }
    return WIDE ? sum : (double)((few[0] + few[1]) + (few[2] + few[3]));
}

// The same of all columns that exist.
template <int J = 0> DEVICE double wide_squares(const float (&acc)[128], u32 columns) {
    if constexpr (J == BN / BK) {
        return 0.0;
    } else {
        if (J * BK >= columns) return 0.0;
        u32 pairs[8][2];
        rounded<J>(pairs, acc);
        return squares_of<true>(pairs) + wide_squares<J + 1>(acc, columns);
    }
}

DEVICE u32 own_row() { return own_rows() + threadIdx.x % WARP / 4; }

// The sums of squares that a consumer warp leaves, one for each tile of a gradient, where `squares` is not null; never for f32. Lanes are added up
// while the next tile is multiplied.
struct LeftSquares {
    double* squares;
    double* at = nullptr;  // where the sum of the last tile goes
    double own = 0.0;

    DEVICE explicit LeftSquares(double* squares) : squares(sizeof(OUT) == 4 ? nullptr : squares) {}

    // This lane's part of tile t.
    DEVICE void put(u64 t, double sum) {
        at = squares == nullptr ? nullptr : squares + t * CONSUMERS + own_rows() / 16;
        own = sum;
    }

    DEVICE void send() {
        if (at == nullptr) return;
        const double sum = warp_sum(own);
        if (threadIdx.x % WARP == 0) *at = sum;
        at = nullptr;
    }
};

// Tile t. f32 is stored from registers.
DEVICE void write_weight(ResultStores& stores, const TensorMap& map, bf16* at, u64 stride, u32 x, u32 y, u32 rows, u32 columns,
                         const float (&acc)[128], LeftSquares& left, u64 t) {
    const bool counts = left.squares != nullptr && own_rows() < rows;  // of a warpgroup's 64 rows all exist or none does
    double sum = 0.0;
    write(stores, {map, at, stride}, x, y, rows, columns, acc, [&](const u32 (&pairs)[8][2]) {
        if (counts) sum += squares_of<false>(pairs);
    });
    if (counts && !is_exact(sum)) sum = wide_squares(acc, columns);
    left.put(t, sum);
}
DEVICE void write_weight(ResultStores&, const TensorMap&, float* at, u64 stride, u32 x, u32 y, u32 rows, u32 columns,
                         const float (&acc)[128], LeftSquares&, u64) {
    float* const to = at + y * stride + x;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        float* const line = to + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++)
            if (row < rows && 8 * n < columns)
                *reinterpret_cast<float2*>(line + 8 * n) = make_float2(acc[4 * n + 2 * h], acc[4 * n + 2 * h + 1]);
    }
}

DEVICE void write_zeros(OUT* to, u64 stride, u32 rows, u32 columns) {
    for (u32 i = threadIdx.x - GROUP; i < BM * BN; i += 2 * GROUP)
        if (i / BN < rows && i % BN < columns) to[i / BN * stride + i % BN] = from_float<OUT>(0.0f);
}

// Two elements side by side, zeros unless they exist.
DEVICE float2 two(const bf16* at, bool exist) {
    const u32 pair = exist ? *reinterpret_cast<const u32*>(at) : 0;
    return make_float2(low(pair), high(pair));
}
DEVICE float2 two(const float* at, bool exist) { return exist ? *reinterpret_cast<const float2*>(at) : make_float2(0.0f, 0.0f); }

// acc += what is there already.
DEVICE void add_old(float (&acc)[128], const OUT* from, u64 stride, u32 rows, u32 columns) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u32 row = own_row() + 8 * h;
        const OUT* const line = from + row * stride + threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < BN / 8; n++) {
            const float2 old = two(line + 8 * n, row < rows && 8 * n < columns);
            acc[4 * n + 2 * h] += old.x;
            acc[4 * n + 2 * h + 1] += old.y;
        }
    }
}

// Registers of a producer thread and of a consumer thread: together those of the block.
constexpr int FEW = 40, MANY = 232;

// The rows of experts.
struct Routed {
    const i32* offsets;
    Fault* fault;
    u32 rows, experts;
};

// The tiles of n columns of experts' rows, by all threads of a block: a producer calls copy(space, turn, tile) for each of them, consumers
// product(acc, space, turn, meanwhile).
template <bool PAIR, class C, class P> DEVICE void rows_tiles(const Target& out, const Routed& routed, u32 n, C copy, P product) {
    const Space space = prepare<PAIR>();
    const auto tiles = row_tiles<PAIR, BN>(space, routed.offsets, routed.fault, routed.rows, routed.experts, n);
    Turn turn;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x == 0) tiles.each([&](const RowTile& tile) { copy(space, turn, tile); });
    } else {
        more_registers<MANY>();
        ResultStores stores(space);
        for (u64 t = tiles.first(); t < tiles.count; t += tiles.stride()) {
            RowTile tile;
            float acc[128];
            product(acc, space, turn, [&] { tile = tiles.at(t); });
            write(stores, out, tile.column, tile.row, tile.rows, n - tile.column, acc);
        }
        stores.close();
        part<PAIR>();
    }
}

// A gradient of experts' weights (E,oc,ic).
struct WeightTarget {
    OUT* at;
    const TensorMap& map;
    u32 ic, oc;
    u32 adds;
    double* squares;
};

// The tiles of a gradient of weights, by all threads of a block: a producer calls copy(space, turn, groups, tile) for each of them, consumers
// product(acc, space, turn, first, terms, left) for each whose expert has rows, by the first of them; that sends what is left of the tile before.
template <bool PAIR, class C, class P> DEVICE void weight_tiles(const WeightTarget& to, const Routed& routed, C copy, P product) {
    const Space space = prepare<PAIR>();
    const Groups groups = read_groups<BM>(space.groups, routed.offsets, routed.experts, routed.rows, routed.fault);
    if constexpr (PAIR) cluster_barrier();
    const auto [d_weight, map, ic, oc, adds, squares] = to;
    const WeightTiles<BM, BN, PAIR ? 2 : 1> tiles(groups, oc, ic, PAIR ? cluster_rank() : 0);
    Turn turn;
    if (threadIdx.x < GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x == 0) tiles.each([&](const WeightTile& tile) { copy(space, turn, groups, tile); });
    } else {
        more_registers<MANY>();
        ResultStores stores(space);
        LeftSquares left(squares);
        for (u64 t = tiles.first(); t < tiles.count; t += tiles.stride()) {  // in `each` f32 would spill registers
            const WeightTile tile = tiles.at(t);
            const auto [expert, row, column] = tile;
            const u32 terms = groups.rows(expert);
            OUT* const own = d_weight + ((u64)expert * oc + row) * ic + column;
            if (terms == 0) {
                if (!adds) write_zeros(own, ic, oc - row, ic - column);
                left.send();
                left.put(tiles.number(tile), 0.0);
                continue;
            }
            float acc[128];
            product(acc, space, turn, groups.first(expert), terms, left);
            if (adds) add_old(acc, own, ic, oc - row, ic - column);
            write_weight(stores, map, d_weight, ic, column, expert * oc + row, oc - row, ic - column, acc, left, tiles.number(tile));
        }
        left.send();
        stores.close();
        part<PAIR>();
    }
}
#endif
