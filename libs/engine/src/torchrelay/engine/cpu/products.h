/* Linear layers, of weights with two bytes each: for fp32 there are better kernels. */
#pragma once

#include "numbers.h"

/* A register's numbers; how many rows of weights, and at most of x, are computed together: their sums stay in registers. */
#ifdef __AVX512F__
#define LANES 16
#define OUTPUTS 4
#define ROWS 6
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#define WIDENED(halves) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves)))
#else
#define LANES 8
#define OUTPUTS 4
#define ROWS 2
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#define WIDENED(halves) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves)))
#endif
#define STEP (2 * LANES) /* weights taken at a time */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(2)));

/* Half of the next weights: of bf16 those at even places or those at odd ones, each a half of a 32-bit lane. */
INLINE floats take(int D, const void *weights, int half) {
    if (D == F16) return WIDENED((const char *)weights + half * 2 * LANES);
    words pairs = *(const words *)weights;
    return (floats)(half ? pairs & 0xffff0000u : pairs << 16);
}

/* Rows of x in fp32, in the order in which `take` gives the weights that they meet. */
INLINE void widen(int D, const void *x, long count, float *wide) {
    for (long i = 0; i < count; i += STEP)
        for (long j = 0; j < STEP / 2; j++) {
            wide[i + j] = get(D, x, D == BF16 ? i + 2 * j : i + j);
            wide[i + STEP / 2 + j] = get(D, x, D == BF16 ? i + 2 * j + 1 : i + STEP / 2 + j);
        }
}

/* The totals of as many vectors as they have lanes, as the lanes of one. Each round halves their number. */
INLINE floats totals(floats *each) {
    const words lane = LANE_NUMBERS;
    for (int half = LANES / 2; half > 0; half /= 2) {
        words other = (lane & half) * (LANES / half); /* 0 or LANES: from the first vector or the second */
        for (int i = 0; i < half; i++)
            each[i] = __builtin_shuffle(each[i], each[i + half], lane + other) +
                      __builtin_shuffle(each[i], each[i + half], (lane ^ half) + other);
    }
    return each[0];
}

/* The hardware's own prefetching ends with every page of 4 KB, and a row is hardly longer. */
#define AHEAD 8 /* rows */
#define TILE ((OUTPUTS * ROWS + LANES - 1) / LANES * LANES)

/* `outputs` rows of weights times `rows` of x. */
INLINE void tile(int D, int rows, int outputs, const float *wide, long size, const void *weights, const void *bias,
                 void *out, long stride) {
    floats sums[TILE] = {0}; /* of each row and output */
    for (long i = 0; i < size; i += STEP) {
        for (int o = 0; o < outputs; o++) __builtin_prefetch(at(D, weights, (o + AHEAD) * size + i));
        for (int half = 0; half < 2; half++) {
            floats taken[OUTPUTS];
            for (int o = 0; o < outputs; o++) taken[o] = take(D, at(D, weights, o * size + i), half);
            for (int r = 0; r < rows; r++) {
                floats x = ((const floats *)(wide + r * size + i))[half];
                for (int o = 0; o < outputs; o++) sums[r * outputs + o] += taken[o] * x;
            }
        }
    }
    float results[TILE];
    for (int first = 0; first < rows * outputs; first += LANES) *(floats *)(results + first) = totals(sums + first);
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outputs; o++)
            put(D, out, r * stride + o, results[r * outputs + o] + (bias ? get(D, bias, o) : 0.0f));
}

INLINE void some_outputs(int D, int rows, const float *wide, long size, const void *weights, const void *bias,
                         long begin, long end, void *out, long stride) {
    for (long o = begin; o < end; o += OUTPUTS) {
        const void *own = at(D, weights, o * size), *add = bias ? at(D, bias, o) : NULL;
        void *to = place(D, out, o);
        if (o + OUTPUTS <= end) tile(D, rows, OUTPUTS, wide, size, own, add, to, stride);
        else
            for (int i = 0; i < end - o; i++)
                tile(D, rows, 1, wide, size, at(D, own, i * size), add ? at(D, add, i) : NULL, place(D, to, i), stride);
    }
}

#define CHUNK 64 /* outputs whose weights wait in the core's cache for the next rows of x */

/* Outputs from `begin` to `end` of all rows. */
INLINE void outputs_between(int D, const float *wide, long num_rows, long size, const void *weights, long num_out,
                            const void *bias, long begin, long end, void *out) {
    for (long c = begin; c < end; c += CHUNK) {
        long until = c + CHUNK < end ? c + CHUNK : end;
        for (long r = 0; r < num_rows; r += ROWS) {
            const float *rows = wide + r * size;
            void *to = place(D, out, r * num_out);
            switch (num_rows - r) {
            case 1: some_outputs(D, 1, rows, size, weights, bias, c, until, to, num_out); break;
#if ROWS > 2
            case 2: some_outputs(D, 2, rows, size, weights, bias, c, until, to, num_out); break;
            case 3: some_outputs(D, 3, rows, size, weights, bias, c, until, to, num_out); break;
            case 4: some_outputs(D, 4, rows, size, weights, bias, c, until, to, num_out); break;
            case 5: some_outputs(D, 5, rows, size, weights, bias, c, until, to, num_out); break;
#endif
            default: some_outputs(D, ROWS, rows, size, weights, bias, c, until, to, num_out);
            }
        }
    }
}

void torchrelay_linear(int dtype, const void *x, long num_rows, long size, const void *weights, long num_out,
                       const void *bias, float *wide, void *out) {
    if (dtype == BF16) widen(BF16, x, num_rows * size, wide);
    else widen(F16, x, num_rows * size, wide);
    long num_tiles = (num_out + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel if (num_out * size > SMALL)
    {
        long team = omp_get_num_threads(), me = omp_get_thread_num();
        long begin = num_tiles * me / team * OUTPUTS, end = num_tiles * (me + 1) / team * OUTPUTS;
        if (end > num_out) end = num_out;
        if (dtype == BF16) outputs_between(BF16, wide, num_rows, size, weights, num_out, bias, begin, end, out);
        else outputs_between(F16, wide, num_rows, size, weights, num_out, bias, begin, end, out);
    }
}
