// Which elements dropout drops, as a function of seed, step, micro-step, place in the model, row and column: the same bits as
// core/src/dropout.rs. A word of 32 random bits decides about two columns that are 8 apart, its lower half about the first.
#pragma once

#include "common/random.cuh"

// Separates the bits of dropout from those of stochastic rounding.
constexpr u32 DROPOUT_SALT = 0x2545f491u;

// The mask of one row.
struct DropRow {
    u32 first, second;

    // For columns index/8*16 + index%8 and 8 more.
    DEVICE u32 word(u32 index) const { return second_round(first_round(first + index) ^ second); }
};

// The mask of a matrix.
struct Drops {
    u32 first, second, words;  // words: of a row
    u32 threshold;             // elements whose 16 bits are below it are dropped
    float keep;                // what the others are multiplied with

    DEVICE DropRow row(u64 row) const {
        u64 before = row * words;
        return {first + (u32)before, second + (u32)(before >> 32)};
    }
    DEVICE bool keeps_low(u32 word) const { return (word & 0xffffu) >= threshold; }
    DEVICE bool keeps_high(u32 word) const { return word >> 16 >= threshold; }
    DEVICE bool keeps(u64 at, u32 col) const {
        u32 word = row(at).word(col / 16 * 8 + col % 8);
        return col & 8 ? keeps_high(word) : keeps_low(word);
    }
};

// The mask of place `site` in this step and micro-step, for rows of `cols` elements.
DEVICE Drops make_drops(const Scalars* s, u32 site, u32 threshold, float keep, u32 cols) {
    StepKey key = step_key(s);
    u32 first = mix(key.first ^ mix(site + DROPOUT_SALT));
    return {first, mix(key.second ^ mix(s->micro_step + first)), (cols + 15) / 16 * 8, threshold, keep};
}
