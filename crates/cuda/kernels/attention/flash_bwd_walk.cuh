// The order in which blocks of flash_bwd_wgmma.cu take the tiles of a batch, and where these are in qkv.
#pragma once

#include "common/prelude.cuh"

constexpr int HD = 64, TILE = 128;
constexpr u32 MOST_BLOCKS = 144;  // multiprocessors of a whole chip

// The first strip of each block, and the end of the last one's.
struct Cuts {
    u32 at[MOST_BLOCKS + 1];
};

// The strips of a block, counted over all units. First the beginning of a unit that the next block ends, then whole units, last the end of a
// unit that the block before has begun.
struct Work {
    u32 tiles, begin, end;  // tiles of a sequence

    DEVICE bool begins_only(u32 unit) const { return (unit + 1) * tiles > end; }
    DEVICE bool ends_only(u32 unit) const { return unit * tiles < begin; }
};

// A tile of keys and one of queries. Passes of odd tiles of keys go backwards over the queries: what was read last is read next.
struct Pair {
    u32 tiles, share;  // of a sequence; heads of queries of a unit
    u32 unit;          // part of a head of keys of the whole batch; NONE behind the last
    u32 key, member, query;
    u32 keys;   // tiles of keys so far
    u32 count;  // pairs so far

    static constexpr u32 NONE = 0xffffffff;
    DEVICE bool is_there() const { return unit != NONE; }

    DEVICE bool backwards() const { return key % 2; }
    DEVICE bool begins_pass() const { return query == (backwards() ? tiles - 1 : key); }
    DEVICE bool ends_pass() const { return query == (backwards() ? key : tiles - 1); }
    DEVICE bool begins() const { return member == 0 && begins_pass(); }  // the first of its keys
    DEVICE bool ends() const { return member == share - 1 && ends_pass(); }
    DEVICE bool meets() const { return key == query; }  // some of the keys are behind some of the queries
    // The first pair of a block.
    DEVICE void start(const Work& work) {
        key = query = member = 0;
        if (work.end % tiles) unit = work.end / tiles;
        else go_to((work.begin + tiles - 1) / tiles, work);
    }
    // The first key of a whole unit, or of the rest of one if no whole unit is left.
    DEVICE void go_to(u32 whole, const Work& work) {
        const u32 rest = work.begin % tiles;
        key = whole < work.end / tiles ? 0 : rest;
        unit = whole < work.end / tiles ? whole : rest ? work.begin / tiles : NONE;
        query = backwards() ? tiles - 1 : key;
    }
    DEVICE void next(const Work& work) {
        count++;
        if (!ends_pass()) {
            query += backwards() ? -1 : 1;
            return;
        }
        if (++member == share) {
            member = 0;
            keys++;
            key++;
            const bool begun = work.begins_only(unit) && unit * tiles + key == work.end;
            if (begun || key == tiles) {
                if (work.ends_only(unit)) unit = NONE;
                else go_to(begun ? (work.begin + tiles - 1) / tiles : unit + 1, work);
                return;
            }
        }
        query = backwards() ? tiles - 1 : key;
    }
};

struct Shape {
    u32 heads, kv_heads, parts;
    float scale;

    DEVICE u32 sequence(const Pair& at) const { return at.unit / (kv_heads * parts); }
    DEVICE u32 head(const Pair& at) const { return at.unit % (kv_heads * parts) * at.share + at.member; }
    DEVICE u32 kv_head(const Pair& at) const { return at.unit / parts % kv_heads; }
    // Columns of qkv and its gradient, and a row of the batch.
    DEVICE i32 q_column(const Pair& at) const { return (i32)(head(at) * HD); }
    DEVICE i32 k_column(const Pair& at) const { return (i32)((heads + kv_head(at)) * HD); }
    DEVICE i32 v_column(const Pair& at) const { return (i32)((heads + kv_heads + kv_head(at)) * HD); }
    DEVICE i32 row(const Pair& at, u32 tile) const { return (i32)((sequence(at) * at.tiles + tile) * TILE); }
};
