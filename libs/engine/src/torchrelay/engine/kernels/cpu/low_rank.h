/* The changes of LoRA adapters: each row may have an adapter of its own. */
#pragma once

#include "matmul.h"

/* scaling * b(a(x)), added to the outputs from `begin` on. a is [rank, in], b is [rank, out]; numbers are 16-bit. */
struct change {
    const void *a, *b;
    long begin, num_out, rank;
    float scaling;
};

/* The changes of a fused projection. */
struct changes {
    const struct change *each;
    long count;
};

enum group { QKV, O, GATE_UP, DOWN, GROUPS }; /* in the order of low_rank.py */
#define MOST_RANKS 512

INLINE float total(floats sums) {
    float sum = 0.0f;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

/* Computes `count` of the numbers between a and b. */
INLINE void shrink(int D, const void *x, long size, const void *a, int count, float scaling, float *low) {
    floats sums[4] = {0};
    for (long i = 0; i < size; i += STEP)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            floats taken = take(D, at(D, x, i), half);
#pragma GCC unroll 4
            for (int j = 0; j < count; j++) sums[j] += take(D, at(D, a, j * size + i), half) * taken;
        }
    for (int j = 0; j < count; j++) low[j] = total(sums[j]) * scaling;
}

enum { BLOCK = 4096 }; /* outputs whose sums are on the stack at once: uploads decide how many there are in all */

/* Adds the products of `count` of the numbers between a and b to the sums of `size` outputs of `num_out`. */
INLINE void expand(int D, const float *low, const void *b, long num_out, long size, int count, floats *sums) {
    for (long o = 0; o < size; o += STEP, sums += 2)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int j = 0; j < count; j++) sums[half] += take(D, at(D, b, j * num_out + o), half) * low[j];
}

INLINE void any_change(int D, const struct change *c, const void *x, long size, void *out) {
    long whole = c->num_out / STEP * STEP, j = 0;
    float low[MOST_RANKS];
    for (; j + 4 <= c->rank; j += 4) shrink(D, x, size, at(D, c->a, j * size), 4, c->scaling, low + j);
    for (; j < c->rank; j++) shrink(D, x, size, at(D, c->a, j * size), 1, c->scaling, low + j);
    out = place(D, out, c->begin);
    for (long begin = 0; begin < whole; begin += BLOCK) {
        long count = whole - begin < BLOCK ? whole - begin : BLOCK;
        floats sums[2 * BLOCK / STEP];
        memset(sums, 0, sizeof sums);
        for (j = 0; j + 4 <= c->rank; j += 4)
            expand(D, low + j, at(D, c->b, j * c->num_out + begin), c->num_out, count, 4, sums);
        for (; j < c->rank; j++)
            expand(D, low + j, at(D, c->b, j * c->num_out + begin), c->num_out, count, 1, sums);
        for (long o = 0; o < count; o += STEP)
            for (int i = 0; i < STEP; i++) { /* of bf16, take gives the even numbers, then the odd ones */
                float sum = D == BF16 ? sums[o / LANES + i % 2][i / 2] : sums[o / LANES + i / LANES][i % LANES];
                put(D, out, begin + o + i, get(D, out, begin + o + i) + sum);
            }
    }
    for (long o = whole; o < c->num_out; o++) {
        float sum = 0.0f;
        for (j = 0; j < c->rank; j++) sum += get(D, c->b, j * c->num_out + o) * low[j];
        put(D, out, o, get(D, out, o) + sum);
    }
}

/* Adds the changes of a row's adapter to the row's outputs. */
static __attribute__((noinline)) void adapt_row(int dtype, const struct changes *of, const void *x, long size, void *out) {
    for (const struct change *c = of->each; c < of->each + of->count; c++)
        BY_HALF(dtype, any_change(D, c, x, size, out));
}

/* Adds the changes of all rows for a layer and a group. `adapters` has each row's changes by layer and group, NULL for a
 * row without an adapter. */
void torchrelay_adapt(int dtype, const struct changes *const *adapters, long layer, long group, const void *x,
                      long num_rows, long size, void *out, long num_out) {
#pragma omp parallel for schedule(static) if (num_rows > 1)
    for (long r = 0; r < num_rows; r++)
        if (adapters[r])
            adapt_row(dtype, adapters[r] + layer * GROUPS + group, (const char *)x + 2 * r * size, size,
                      (char *)out + 2 * r * num_out);
}
