/* Dtypes, which are read as fp32 and rounded once, and functions over them. I8 is a dtype of weights only. */
#pragma once

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum dtype { F32, BF16, F16, I8 };

#define INLINE static inline __attribute__((always_inline))
/* Calls a function with the dtype as a constant, so that it is compiled separately for each. */
#define BY_DTYPE(dtype, call)                                                                                          \
    do {                                                                                                               \
        if ((dtype) == F32) { enum { D = F32 }; call; }                                                                \
        else if ((dtype) == BF16) { enum { D = BF16 }; call; }                                                         \
        else { enum { D = F16 }; call; }                                                                               \
    } while (0)

/* The same for the two-byte dtypes only. */
#define BY_HALF(dtype, call)                                                                                           \
    do {                                                                                                               \
        if ((dtype) == BF16) { enum { D = BF16 }; call; }                                                              \
        else { enum { D = F16 }; call; }                                                                               \
    } while (0)

/* Number of elements below which a second thread does not pay. */
#define SMALL 32768

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* fp16 in integer arithmetic: gcc before 12 has no fp16, and later versions convert one number at a time. */
INLINE float of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;
    uint32_t normal = (size << 13) + (112 << 23), subnormal = bits_of((float)(int32_t)size * 0x1p-24f);
    uint32_t bits = size < 0x400 ? subnormal : normal;
    return of_bits(sign | (size < 0x7c00 ? bits : size << 13 | 0x7f800000));
}

/* Rounds to nearest, ties to even. */
INLINE uint16_t f16_of(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7fffffff;
    uint32_t normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(of_bits(size) + 0.5f) - bits_of(0.5f); /* the next fp32 after 0.5 is 2^-24 away */
    uint32_t bits = size < 0x38800000 ? subnormal : normal;
    bits = size < 0x47800000 ? bits : 0x7c00;
    return (uint16_t)(sign | (x == x ? bits : 0x7e00));
}

INLINE float get(int D, const void *from, long i) {
    if (D == F32) return ((const float *)from)[i];
    uint16_t bits = ((const uint16_t *)from)[i];
    return D == F16 ? of_f16(bits) : of_bits((uint32_t)bits << 16);
}

/* Rounds to nearest, ties to even. */
INLINE uint16_t bf16_of(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(x == x ? rounded : 0x7fc0);
}

INLINE void put(int D, void *to, long i, float x) {
    if (D == F32) ((float *)to)[i] = x;
    else ((uint16_t *)to)[i] = D == F16 ? f16_of(x) : bf16_of(x);
}

INLINE float rounded(int D, float x) {
    if (D == F32) return x;
    return D == F16 ? of_f16(f16_of(x)) : of_bits((uint32_t)bf16_of(x) << 16);
}

#define SIZE(D) ((D) == F32 ? 4 : (D) == I8 ? 1 : 2)

/* The address of the i-th number from `base`. */
INLINE const void *at(int D, const void *base, long i) {
    return (const char *)base + i * SIZE(D);
}

INLINE void *place(int D, void *base, long i) {
    return (char *)base + i * SIZE(D);
}

/* exp(x) within 2 ulp: a power of two times a polynomial around zero (Cephes' expf). Infinite from 88.4 on, never
 * zero. */
INLINE float exponential(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float whole = rintf(x * 1.44269504f);
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * of_bits((uint32_t)((int32_t)whole + 127) << 23);
}

INLINE float sigmoid(float x) {
    return 1.0f / (1.0f + exponential(-x));
}
