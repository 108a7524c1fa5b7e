// Tensor cores: the instructions that C++ has no name for (sm_80 and newer).
//
// Which element of a matrix a lane holds, with g = lane/4 and t = lane%4, pairs packed low half first:
//   ldmatrix        r[i] = row g, columns 2t and 2t+1 of 8x8 matrix i, whose row n starts at the address of lane 8i+n
//   ldmatrix_trans  r[i] = rows 2t and 2t+1, column g of that matrix
//   mma             c (16x8) += a (16x16) . b (16x8)
//                   a[0] (g, 2t..), a[1] (g+8, 2t..), a[2] (g, 2t+8..), a[3] (g+8, 2t+8..)
//                   b0 (2t.., g), b1 (2t+8.., g);  c[0..1] (g, 2t..), c[2..3] (g+8, 2t..)
//   mma_tf32        c (16x8) += a (16x8) . b (8x8)
//                   a[0] (g, t), a[1] (g+8, t), a[2] (g, t+4), a[3] (g+8, t+4);  b[0] (t, g), b[1] (t+4, g);  c as above
#pragma once

#include "common/async_copy.cuh"

DEVICE u32 lane() { return threadIdx.x % WARP; }
// Where element e of a lane's c is.
DEVICE int row_of(int e) { return lane() / 4 + e / 2 * 8; }
DEVICE int column_of(int e) { return lane() % 4 * 2 + e % 2; }

DEVICE void ldmatrix(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}
DEVICE void ldmatrix_trans(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

// E is bf16 or f16.
template <class E> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;

#define MMA(TYPE)                                                                                                           \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <class E> DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_BF16<E>) MMA("bf16");
    else MMA("f16");
}

// Of operands the lowest 13 bits do not count.
DEVICE void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// A number whose upper bits are a tf32 near x, in one instruction: cutting off the rest takes half a step on average,
// between a third and two thirds of one as the mantissa is, so that much is added before. Off by two thirds of a step at most
// and not in one direction; by norm 5 % more than rounding to the nearest. NaN and infinity stay what they are.
DEVICE u32 near_tf32(float x) { return __float_as_uint(x * (1.0f + 11.0f / 32768.0f)); }

// Two floats rounded to E, the first in the low half.
template <class E> DEVICE u32 pack(float low, float high) {
    u32 out;
    if constexpr (IS_BF16<E>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
