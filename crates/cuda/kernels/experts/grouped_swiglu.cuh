// The experts' product with SwiGLU behind it, on Hopper: three warps compute the epilogue while the next tile is multiplied.
//
// If the consumers computed the exponentials of a tile, that would take a fifth of the time of its products (768 terms of bf16) while the
// tensor cores wait. So gates and ups stay in the store tiles until the epilogue warps have read them. A file that includes this defines
// BYTES and EPILOGUE_GROUPS, see grouped_hopper.cuh.
#pragma once

constexpr int STAGES = 3, STORE_STAGES = 4;
#include "experts/grouped_hopper.cuh"
#include "elementwise/swiglu.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Registers of a producer or epilogue thread, and of a consumer thread: together those of the block.
constexpr int FEW = 88, MANY = EPILOGUE_GROUPS == 2 ? 168 : 208;
constexpr u32 HALF = BN / 2;                // columns of act in a tile
constexpr u32 ROWS_AT_ONCE = EPILOGUE_GROUPS == 2 ? 2 : 4;  // rows of an epilogue warp at a time
constexpr u32 STEP = EPILOGUE_WARPS * ROWS_AT_ONCE;  // rows of all epilogue warps at a time
static_assert(ROWS_AT_ONCE * EPILOGUE_WARPS <= 16, "every epilogue warp has rows of every consumer");

DEVICE u32 gated(u32 gate, u32 up) {
    return pack_bf16(swiglu<bf16>(low(gate), low(up)), swiglu<bf16>(high(gate), high(up)));
}

// act from gates and ups in ROWS_AT_ONCE rows of store tiles, of which `rows` and `columns` of HALF exist: two rows at a time, 8
// columns to a lane. Everything is read before anything is written, so that many loads are in flight. `act.put(at, eight)` takes 8
// elements from element `at` on, rounded to bf16; the first of the rows begins at `start`.
template <class Act> DEVICE void activate(Act& act, u64 start, u64 f, u32 tiles, u32 first, i32 rows, u32 columns) {
    const u32 lane = threadIdx.x % WARP, chunk = lane % 16;
    uint4 gate[ROWS_AT_ONCE / 2], up[ROWS_AT_ONCE / 2];
#pragma unroll
    for (u32 i = 0; i < ROWS_AT_ONCE / 2; i++) {
        const u32 row = first + 2 * i + lane / 16;
        const u32 at = tiles + chunk / 8 * STORE_TILE + row * 128 + ((chunk % 8) ^ row % 8) * 16;
        gate[i] = load_shared(at);
        up[i] = load_shared(at + 2 * STORE_TILE);
    }
#pragma unroll
    for (u32 i = 0; i < ROWS_AT_ONCE / 2; i++)
        gate[i] = {gated(gate[i].x, up[i].x), gated(gate[i].y, up[i].y), gated(gate[i].z, up[i].z), gated(gate[i].w, up[i].w)};
#pragma unroll
    for (u32 i = 0; i < ROWS_AT_ONCE / 2; i++) {
        const u32 row = 2 * i + lane / 16;
        if ((i32)row < rows && chunk * 8 < columns) act.put(start + row * f + chunk * 8, gate[i]);
    }
}

// Stores the gates of HALF columns from x on, then the ups of the same columns, which start at f. They stay in the store tiles.
template <int J = 0>
DEVICE void write_halves(ResultStores& stores, const Target& to, u32 x, u32 f, u32 y, u32 rows, const float (&acc)[128]) {
    if constexpr (J < BN / BK) {
        u32 pairs[8][2];
        rounded<J>(pairs, acc);
        const u32 from = stores.next(), column = x + J % 2 * BK, row = y + own_rows();
        const i32 there = column < f ? (i32)rows - (i32)own_rows() : 0;
        store_rows(from, pairs);
        if (there >= 16) stores.send(to, column + J / 2 * f, row, from);
        else tma_store_commit(), stores.write_some(to, column + J / 2 * f, row, there, pairs);
        write_halves<J + 1>(stores, to, x, f, y, rows, acc);
    }
}

// out (rows,2F) and act (rows,F) from inp (rows,k) and the experts' weights (2F,k). `multiply(acc, space, turn, meanwhile)` is the product of
// a tile.
template <bool PAIR = false, class Act, class F>
DEVICE void swiglu_product(const Target& out, Act act, const TensorMap& inp, const TensorMap& weight, const i32* offsets, Fault* fault,
                           u32 rows, u32 experts, u32 f, u32 k, F multiply) {
    const Space space = prepare<PAIR>();
    const auto tiles = row_tiles<PAIR, HALF>(space, offsets, fault, rows, experts, f);
    const u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Turn turn;
    if (threadIdx.x < GROUP || threadIdx.x >= 3 * GROUP) {
        fewer_registers<FEW>();
        if (threadIdx.x == 0) {
            tiles.each([&](const RowTile& tile) {
                const i32 line = (i32)(tile.expert * 2 * f + tile.column);
                copy_tile<true, true, true, PAIR>(space, turn, inp, weight, {(i32)tile.row, 0, line, 0, k, tile.shares}, line + (i32)f);
            });
        } else if (warp > 0) {
            const u32 mine = warp < GROUP / WARP ? warp - 1 : warp - 2 * GROUP / WARP - 1;
            u32 parity = 0;
            tiles.each([&](const RowTile& tile) {
                const u64 to = tile.row * (u64)f + tile.column;
                u32 before = CONSUMERS;
                for (u32 row = mine * ROWS_AT_ONCE; row < BM; row += STEP) {
                    const u32 consumer = row / 16;
                    if (consumer != before) barrier_wait(space.filled + 8 * consumer, parity);
                    before = consumer;
                    activate(act, to + row * (u64)f, f, space.store_tile(consumer), row % 16, (i32)tile.rows - (i32)row, f - tile.column);
                    __syncwarp();
                    if (lane == 0 && (row + STEP) / 16 != consumer) barrier_arrive(space.drained + 8 * consumer);
                }
                parity ^= 1;
            });
            act.finish();
        }
    } else {
        more_registers<MANY>();
        ResultStores stores(space);
        const u32 consumer = warp - GROUP / WARP;
        u32 parity = 1;
        for (u64 t = tiles.first(); t < tiles.count; t += tiles.stride(), parity ^= 1) {
            RowTile tile;
            float acc[128];
            multiply(acc, space, turn, [&] { tile = tiles.at(t); });
            barrier_wait(space.drained + 8 * consumer, parity);  // the epilogue has read the tile before
            write_halves(stores, out, tile.column, f, tile.row, tile.rows, acc);
            __syncwarp();
            if (lane == 0) barrier_arrive(space.filled + 8 * consumer);
        }
        stores.close();
        part<PAIR>();
    }
}
#endif
