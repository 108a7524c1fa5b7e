// Random bits that are a function of seed, step and place: the same bits as core/src/rounding.rs.
#pragma once

#include "common/prelude.cuh"

constexpr u32 GOLDEN = 0x9e3779b9u;

// The halves of `mix`; between both, dropout adds a key.
DEVICE u32 first_round(u32 x) { return (x ^ (x >> 16)) * 0x7feb352du; }
DEVICE u32 second_round(u32 x) {
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}
// Each input bit reaches every output bit.
DEVICE u32 mix(u32 x) { return second_round(first_round(x)); }

// What all random bits of a step are made from.
struct StepKey {
    u32 first, second;
};
DEVICE StepKey step_key(const Scalars* s) {
    u32 first = mix((u32)s->seed ^ mix(s->step + GOLDEN));
    return {first, mix((u32)(s->seed >> 32) ^ first)};
}
