/* Linear layers with 16-bit weights, or weights in int8 with a scale for each output. For fp32 there are better kernels.
 */
#pragma once

#include "dtypes.h"

/* LANES: numbers per register. FEW, MANY, OUTPUTS_OF: the size of a tile of sums in registers, in rows of x and rows of
 * weights. Few rows are computed at once, many rows in groups. */
#ifdef __AVX512F__
#define LANES 16
#define FEW 8
#define MANY 6
#define OUTPUTS_OF(rows) ((rows) > 6 ? 3 : 4)
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define WIDENED(halves) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves)))
#define WIDENED_BF16(halves) \
    (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(halves))), 16)
#define WIDENED_I8(bytes) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(bytes))))
#else
#define LANES 8
#define FEW 4
#define MANY 4
#define OUTPUTS_OF(rows) ((rows) > 2 ? 3 : 4)
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define WIDENED(halves) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves)))
#define WIDENED_BF16(halves) \
    (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(halves))), 16)
#define WIDENED_I8(bytes) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(bytes))))
#endif
#define STEP (2 * LANES) /* weights taken at a time */
#define TILE 32          /* sums of a tile, in whole vectors of results */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* Half of the next numbers: for bf16 the even or the odd numbers, each of them half of a 32-bit lane. */
INLINE floats take(int D, const void *from, int half) {
    if (D == I8) return WIDENED_I8((const char *)from + half * LANES);
    if (D == F16) return WIDENED((const char *)from + half * 2 * LANES);
    words pairs;
    memcpy(&pairs, from, sizeof pairs); /* not a cast, because they may just have been written as 16-bit numbers */
    return (floats)(half ? pairs & 0xffff0000u : pairs << 16);
}

/* Widens rows and interleaves their vectors: the first of each row, then the second of each row. Numbers have the order
 * in which `take` gives weights of dtype W. */
INLINE void widen(int D, int W, const void *from, long rows, long size, floats *wide) {
    for (long v = 0; v < size / LANES; v += 2, wide += 2 * rows)
        for (long r = 0; r < rows; r++) {
            const void *next = at(D, from, r * size + v * LANES);
            int in_order = D == BF16 && W == I8;
            wide[r] = in_order ? WIDENED_BF16(next) : take(D, next, 0);
            wide[rows + r] = in_order ? WIDENED_BF16(at(D, next, LANES)) : take(D, next, 1);
        }
}

/* The totals of LANES vectors, as the lanes of one vector. Each round halves the number of vectors. */
INLINE floats totals(floats *each) {
    const words lane = LANE_NUMBERS;
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) {
        words other = (lane & half) * (LANES / half); /* 0 or LANES: from the first vector or the second */
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            each[i] = __builtin_shuffle(each[i], each[i + half], lane + other) +
                      __builtin_shuffle(each[i], each[i + half], (lane ^ half) + other);
    }
    return each[0];
}

INLINE void add_products(int rows, int outputs, const floats *x, const floats *weights, floats *sums) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        floats each = x[r];
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) sums[r * outputs + o] += weights[o] * each;
    }
}

/* Reduces a tile's sums to its results. */
INLINE void finish(int D, int rows, int outputs, const floats *sums, const float *scales, const void *bias, void *out,
                   long stride) {
    float results[TILE];
    uint16_t numbers[TILE];
    for (int first = 0; first < rows * outputs; first += LANES) {
        floats each[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) each[i] = first + i < rows * outputs ? sums[first + i] : (floats){0};
        *(floats *)(results + first) = totals(each);
    }
    if (scales)
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) results[r * outputs + o] *= scales[o];
    if (bias)
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < outputs; o++) results[r * outputs + o] += get(D, bias, o);
#pragma omp simd
    for (int i = 0; i < rows * outputs; i++) put(D, numbers, i, results[i]);
    for (int r = 0; r < rows; r++) memcpy(place(D, out, r * stride), numbers + r * outputs, outputs * sizeof *numbers);
}

/* Calls a function with the number of rows as a constant. */
#define ROWS(num, call)                                                                                                \
    case num: {                                                                                                        \
        enum { R = num };                                                                                              \
        call;                                                                                                          \
        break;                                                                                                         \
    }
#if FEW > 4
#define BY_ROWS(rows, call)                                                                                            \
    switch (rows) {                                                                                                    \
        ROWS(1, call) ROWS(2, call) ROWS(3, call) ROWS(4, call) ROWS(5, call) ROWS(6, call) ROWS(7, call) ROWS(8, call) \
    }
#else
#define BY_ROWS(rows, call)                                                                                            \
    switch (rows) { ROWS(1, call) ROWS(2, call) ROWS(3, call) ROWS(4, call) }
#endif

/* The number of chunks of a part that are taken, on its own cache line. */
struct taken {
    long chunks;
} __attribute__((aligned(64)));

/* A linear layer that a thread team computes. */
struct linear {
    long size, num_out;
    const void *weights;
    const float *scales; /* of weights in int8, by output; NULL: the weights have the dtype of the rows */
    const void *bias;
    void *out;
    struct taken *taken, *next; /* by part, zero at first; and those of the next layer, which this layer zeroes */
};

#define AHEAD 8 /* outputs */

/* Weights to prefetch during the computation with other weights, a cache line at each of two places at a time. The
 * hardware's prefetcher stops at every 4 KB page, and a row is hardly longer. */
struct ahead {
    const char *next, *end;
    long apart;
};

/* Computes a tile's sums. If only this tile reads its weights (`once`), it prefetches as many lines as it reads. */
INLINE void tile(int W, int rows, int outputs, int once, const floats *x, long size, const void *weights,
                 struct ahead *ahead, floats *sums) {
    floats own[TILE] = {0};
    const char *next = ahead->next;
    for (long i = 0; i < size; i += STEP, x += 2 * rows) {
        if (once && i * SIZE(W) % 64 == 0)
            for (int o = 0; o < outputs; o++) __builtin_prefetch(at(W, weights, (o + AHEAD) * size + i), 0, 2);
        if (!once) {
            __builtin_prefetch(next, 0, 2);
            __builtin_prefetch(next + ahead->apart, 0, 2);
            next += next < ahead->end ? 64 : 0;
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            floats taken[4];
#pragma GCC unroll 4
            for (int o = 0; o < outputs; o++) taken[o] = take(W, at(W, weights, o * size + i), half);
            add_products(rows, outputs, x + half * rows, taken, own);
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < rows * outputs; i++) sums[i] = own[i];
    ahead->next = next;
}

/* Computes outputs from `begin` to `end` of a group of rows. */
INLINE void group(int D, int W, int rows, int once, const floats *x, const struct linear *l, long begin, long end, void *out,
                  struct ahead *ahead) {
    for (long o = begin; o < end;) {
        const void *weights = at(W, l->weights, o * l->size), *bias = l->bias ? at(D, l->bias, o) : NULL;
        const float *scales = W == I8 ? l->scales + o : NULL;
        void *to = place(D, out, o);
        floats sums[TILE];
        if (o + OUTPUTS_OF(rows) <= end) {
            tile(W, rows, OUTPUTS_OF(rows), once, x, l->size, weights, ahead, sums);
            finish(D, rows, OUTPUTS_OF(rows), sums, scales, bias, to, l->num_out);
            o += OUTPUTS_OF(rows);
        } else {
            tile(W, rows, 1, once, x, l->size, weights, ahead, sums);
            finish(D, rows, 1, sums, scales, bias, to, l->num_out);
            o++;
        }
    }
}

/* Computes outputs from `begin` to `end` of all rows: the weights stay in the core's cache for the next group. */
INLINE void outputs_between(int D, int W, long num_rows, const floats *wide, const struct linear *l, long begin, long end) {
    const char *rest = at(W, l->weights, end * l->size);
    long num_bytes = (end - begin) * l->size * SIZE(W), apart = num_rows > 3 * MANY ? 0 : num_bytes / 2;
    struct ahead ahead = {rest, rest + num_bytes - apart, apart};
    if (num_rows <= FEW) BY_ROWS(num_rows, group(D, W, R, 1, wide, l, begin, end, l->out, &ahead))
    else
        for (long r = 0; r < num_rows; r += MANY) {
            const floats *x = wide + r * (l->size / LANES);
            void *out = place(D, l->out, r * l->num_out);
            BY_ROWS(num_rows - r < MANY ? num_rows - r : MANY, group(D, W, R, 0, x, l, begin, end, out, &ahead));
        }
}

#define CHUNK 48 /* outputs: whole tiles of 3 or 4 */

/* Computes this thread's share of a layer; `wide` has the rows of x, widened in groups.
 *
 * Each thread has a part of the outputs, and then steals chunks from other threads, whose cores may be preempted.
 */
INLINE void any_linear(int D, int W, long num_rows, const floats *wide, const struct linear *l) {
    long me = omp_get_thread_num(), team = omp_get_num_threads(), num_chunks = (l->num_out + CHUNK - 1) / CHUNK;
    l->next[me].chunks = 0;
    for (long turn = me; turn < me + team; turn++) {
        long part = turn % team, first = num_chunks * part / team, num_own = num_chunks * (part + 1) / team - first;
        for (long each; (each = __atomic_fetch_add(&l->taken[part].chunks, 1, __ATOMIC_RELAXED)) < num_own;) {
            long begin = (first + each) * CHUNK, end = begin + CHUNK < l->num_out ? begin + CHUNK : l->num_out;
            outputs_between(D, W, num_rows, wide, l, begin, end);
        }
    }
}

#define LINEAR_OF(D, W, name)                                                                                          \
    static __attribute__((noinline)) void name(long num_rows, const floats *wide, const struct linear *l) {            \
        any_linear(D, W, num_rows, wide, l);                                                                           \
    }
LINEAR_OF(BF16, BF16, bf16_linear)
LINEAR_OF(F16, F16, f16_linear)
LINEAR_OF(BF16, I8, bf16_by_int8_linear)
LINEAR_OF(F16, I8, f16_by_int8_linear)

INLINE void linear_by_team(int D, long num_rows, const floats *wide, const struct linear *l) {
    if (l->scales) (D == BF16 ? bf16_by_int8_linear : f16_by_int8_linear)(num_rows, wide, l);
    else (D == BF16 ? bf16_linear : f16_linear)(num_rows, wide, l);
}

/* The number of rows of x that form a group in `wide`. */
INLINE long rows_together(long num_rows) {
    return num_rows <= FEW ? FEW : MANY;
}

/* Widens the group of rows that starts with row `r`, for weights with these scales. */
INLINE void widen_group(int D, const float *scales, const void *x, long r, long num_rows, long size, floats *wide) {
    long together = rows_together(num_rows), rows = num_rows - r < together ? num_rows - r : together;
    if (scales) widen(D, I8, at(D, x, r * size), rows, size, wide + r * (size / LANES));
    else widen(D, D, at(D, x, r * size), rows, size, wide + r * (size / LANES));
}

void torchrelay_linear(int dtype, const void *x, long num_rows, long size, const void *weights, const float *scales,
                       long num_out, const void *bias, floats *wide, void *out) {
    long most = omp_get_max_threads();
    struct taken taken[2][most];
    memset(taken, 0, sizeof taken);
    struct linear l = {size, num_out, weights, scales, bias, out, taken[0], taken[1]};
#pragma omp parallel if (num_out * size > SMALL)
    {
#pragma omp for
        for (long r = 0; r < num_rows; r += rows_together(num_rows))
            BY_HALF(dtype, widen_group(D, scales, x, r, num_rows, size, wide));
        BY_HALF(dtype, linear_by_team(D, num_rows, wide, &l));
    }
}
