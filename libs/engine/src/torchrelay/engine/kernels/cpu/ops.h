/* Fused operations of a layer: norms, heads, and the gate of an MLP. */
#pragma once

#include "dtypes.h"

/* Norms */

INLINE float scale_of(float squares, long size, float eps) {
    return 1.0f / sqrtf(squares / (float)size + eps);
}

INLINE float weighed(int D, float normed, float weight, int unit_offset) {
    return rounded(D, unit_offset ? normed * (1.0f + weight) : rounded(D, normed) * weight);
}

INLINE void norm_row(int D, const void *x, const void *added, const void *weight, long size, float eps,
                     int unit_offset, void *sum, void *out) {
    float squares = 0.0f;
    if (added) {
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < size; i++) {
            float value = rounded(D, get(D, x, i) + get(D, added, i));
            put(D, sum, i, value);
            squares += value * value;
        }
        x = sum;
    } else {
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < size; i++) squares += get(D, x, i) * get(D, x, i);
    }
    float scale = scale_of(squares, size, eps);
#pragma omp simd
    for (long i = 0; i < size; i++)
        put(D, out, i, weighed(D, get(D, x, i) * scale, get(D, weight, i), unit_offset));
}

void torchrelay_norm(int dtype, const void *x, const void *added, const void *weight, long num_rows, long size,
                     float eps, int unit_offset, void *sum, void *out) {
#pragma omp parallel for if (num_rows * size > SMALL)
    for (long r = 0; r < num_rows; r++)
        BY_DTYPE(dtype, norm_row(D, at(D, x, r * size), added ? at(D, added, r * size) : NULL, weight, size, eps,
                                 unit_offset, place(D, sum, r * size), place(D, out, r * size)));
}

/* Heads */

INLINE void turn_head(int D, const void *head, const void *norm, float eps, int unit_offset, const void *cos,
                      const void *sin, long half, void *out) {
    float wide[2 * half];
    for (long i = 0; i < 2 * half; i++) wide[i] = get(D, head, i);
    if (norm) {
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < 2 * half; i++) squares += wide[i] * wide[i];
        float scale = scale_of(squares, 2 * half, eps);
#pragma omp simd
        for (long i = 0; i < 2 * half; i++) wide[i] = weighed(D, wide[i] * scale, get(D, norm, i), unit_offset);
    }
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float left = wide[i], right = wide[half + i], c = get(D, cos, i), s = get(D, sin, i);
        put(D, out, i, rounded(D, left * c) - rounded(D, right * s));
        put(D, out, half + i, rounded(D, right * c) + rounded(D, left * s));
    }
}

INLINE void place_row(int D, const void *heads, const void *norms, float eps, int unit_offset, const void *cos,
                      const void *sin, void *keys, void *values, void *queries, long num_heads, long num_kv_heads,
                      long head_dim) {
    for (long h = 0; h < num_heads + num_kv_heads; h++) {
        void *to = h < num_heads ? place(D, queries, h * head_dim) : place(D, keys, (h - num_heads) * head_dim);
        turn_head(D, at(D, heads, h * head_dim), norms ? at(D, norms, h * head_dim) : NULL, eps, unit_offset, cos, sin,
                  head_dim / 2, to);
    }
    memcpy(values, at(D, heads, (num_heads + num_kv_heads) * head_dim), (size_t)(num_kv_heads * head_dim * SIZE(D)));
}

void torchrelay_place_heads(int dtype, const void *heads, const void *norms, float eps, int unit_offset,
                            const void *cos, const void *sin, const int64_t *slots, void *kv, long plane,
                            void *queries, long num_rows, long num_heads, long num_kv_heads, long head_dim) {
    long own = (num_heads + 2 * num_kv_heads) * head_dim, in_kv = num_kv_heads * head_dim, half = head_dim / 2;
#pragma omp parallel for if (num_rows * own > SMALL)
    for (long r = 0; r < num_rows; r++)
        BY_DTYPE(dtype, place_row(D, at(D, heads, r * own), norms, eps, unit_offset, at(D, cos, r * half),
                                  at(D, sin, r * half), place(D, kv, slots[r] * in_kv),
                                  place(D, kv, plane + slots[r] * in_kv), place(D, queries, r * num_heads * head_dim),
                                  num_heads, num_kv_heads, head_dim));
}

/* The gate of an MLP */

/* Computes one row. GELU is approximated with tanh(x) = 2 sigmoid(2 x) - 1. */
INLINE void gate_row(int D, const void *gates, const void *ups, long size, int is_silu, void *out) {
#pragma omp simd
    for (long i = 0; i < size; i++) {
        float x = get(D, gates, i);
        float bent = x * sigmoid(is_silu ? x : 1.5957691216f * (x + 0.044715f * x * x * x));
        put(D, out, i, rounded(D, bent) * get(D, ups, i));
    }
}

void torchrelay_gate(int dtype, const void *gate_up, long num_rows, long size, int is_silu, void *out) {
#pragma omp parallel for if (num_rows * size > SMALL)
    for (long r = 0; r < num_rows; r++)
        BY_DTYPE(dtype, gate_row(D, at(D, gate_up, 2 * r * size), at(D, gate_up, (2 * r + 1) * size), size, is_silu,
                                 place(D, out, r * size)));
}
