/* What a layer computes on a CPU with AVX-512, where torch's own steps cost more than reading the weights does.
 *
 * Weights are read from where they lie, once, and widened to fp32 on their way into the core; sums are fp32, in an order
 * that does not depend on how many rows are computed together. Results are rounded where the plain steps of model.py
 * and mlp.py round. What is not finite stays so.
 *
 * Called from kernels.py, which has the shapes. OpenMP's team is torch's own: both load libgomp.so.1.
 */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum dtype { F32, BF16, F16 };

#define INLINE static inline __attribute__((always_inline))
/* Calls a function once with each dtype as a constant, so that each is compiled by itself. */
#define BY_DTYPE(dtype, call)                                                                                          \
    do {                                                                                                               \
        if ((dtype) == F32) { enum { D = F32 }; call; }                                                                \
        else if ((dtype) == BF16) { enum { D = BF16 }; call; }                                                         \
        else { enum { D = F16 }; call; }                                                                               \
    } while (0)

/* Less is not worth waking a second thread for. */
#define SMALL 32768

/* Numbers */

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

/* fp16 bit by bit: compilers before gcc 12 do not know it, and those after convert one number at a time. */
INLINE float of_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = half & 0x7fff;
    uint32_t normal = (size << 13) + (112 << 23), subnormal = bits_of((float)(int32_t)size * 0x1p-24f);
    uint32_t bits = size < 0x400 ? subnormal : normal;
    return of_bits(sign | (size < 0x7c00 ? bits : size << 13 | 0x7f800000));
}

/* To the nearest, to an even one between two. */
INLINE uint16_t f16_of(float x) {
    uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7fffffff;
    uint32_t normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t subnormal = bits_of(of_bits(size) + 0.5f) - bits_of(0.5f); /* a half's next number is 2 to the -24 away */
    uint32_t bits = size < 0x38800000 ? subnormal : normal;
    bits = size < 0x47800000 ? bits : 0x7c00;
    return (uint16_t)(sign | (x == x ? bits : 0x7e00));
}

INLINE float get(int D, const void *from, long i) {
    if (D == F32) return ((const float *)from)[i];
    uint16_t bits = ((const uint16_t *)from)[i];
    return D == F16 ? of_f16(bits) : of_bits((uint32_t)bits << 16);
}

/* To the nearest bf16, to an even one between two. */
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

#define SIZE(D) ((D) == F32 ? 4 : 2)

/* Where the i-th number counted from `base` is. */
INLINE const void *at(int D, const void *base, long i) {
    return (const char *)base + i * SIZE(D);
}

INLINE void *place(int D, void *base, long i) {
    return (char *)base + i * SIZE(D);
}

/* e to the x, within 2 units of the last place: 2 to a whole number times a polynomial around zero (Cephes' expf).
 * Infinite from 88.4 on, but never zero. */
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

/* Linear layers, of weights with two bytes each: for fp32 there are better kernels */

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

/* Of one row; GELU in its approximation by tanh, which is 2 sigmoid(2 x) - 1. */
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

/* Attention of rows that each are the last of their sequence */

/* Taken at a time; what is computed for them, 256 bytes for each number of a head, lies on the stack. */
#define POSITIONS 32
#define HEADS 16

/* Numbers as whole vectors in fp32; what is beyond `count` is zero. */
INLINE void widen_line(int D, const void *from, long count, long num_vectors, float factor, floats *line) {
    float *numbers = (float *)line;
    long whole = D == F16 ? count / LANES : 0;
    for (long v = 0; v < whole; v++) line[v] = WIDENED(at(D, from, v * LANES)) * factor;
    for (long i = whole * LANES; i < count; i++) numbers[i] = get(D, from, i) * factor;
    for (long i = count; i < num_vectors * LANES; i++) numbers[i] = 0.0f;
}

/* The query heads of one row that share a kv head; a softmax that goes along (Milakov and Gimelshein, 2018). */
INLINE void attend_heads(int D, const void *queries, const void *keys, const void *values, const int64_t *slots,
                         long num_slots, long stride, long num_heads, long head_dim, float scale, float cap, void *out) {
    long across = (head_dim + LANES - 1) / LANES;
    floats wide[num_heads][across], sums[num_heads][across], lines[POSITIONS][across];
    float scores[num_heads][POSITIONS], highest[num_heads], weights[num_heads];
    for (long h = 0; h < num_heads; h++) {
        widen_line(D, at(D, queries, h * head_dim), head_dim, across, scale, wide[h]);
        for (long v = 0; v < across; v++) sums[h][v] = (floats){0};
        highest[h] = -INFINITY;
        weights[h] = 0.0f;
    }
    for (long begin = 0; begin < num_slots; begin += POSITIONS, slots += POSITIONS) {
        long count = num_slots - begin < POSITIONS ? num_slots - begin : POSITIONS;
        for (long p = 0; p < count; p++) widen_line(D, at(D, keys, slots[p] * stride), head_dim, across, 1.0f, lines[p]);
        for (long h = 0; h < num_heads; h++) {
            for (long first = 0; first < count; first += LANES) {
                floats products[LANES] = {0};
                for (long p = 0; p < LANES && first + p < count; p++)
                    for (long v = 0; v < across; v++) products[p] += wide[h][v] * lines[first + p][v];
                *(floats *)(scores[h] + first) = totals(products);
            }
            float *own = scores[h], top = highest[h], weight = 0.0f;
            if (cap > 0.0f)
                for (long p = 0; p < count; p++) own[p] = cap * (2.0f * sigmoid(2.0f * own[p] / cap) - 1.0f);
            for (long p = 0; p < count; p++) top = own[p] > top ? own[p] : top;
#pragma omp simd reduction(+ : weight)
            for (long p = 0; p < count; p++) {
                own[p] = exponential(own[p] - top);
                weight += own[p];
            }
            float shrink = exponential(highest[h] - top);
            for (long v = 0; v < across; v++) sums[h][v] *= shrink;
            highest[h] = top;
            weights[h] = weights[h] * shrink + weight;
        }
        for (long p = 0; p < count; p++) widen_line(D, at(D, values, slots[p] * stride), head_dim, across, 1.0f, lines[p]);
        for (long h = 0; h < num_heads; h++)
            for (long v = 0; v < across; v++) {
                floats sum = sums[h][v];
                for (long p = 0; p < count; p++) sum += scores[h][p] * lines[p][v];
                sums[h][v] = sum;
            }
    }
    for (long h = 0; h < num_heads; h++)
        for (long i = 0; i < head_dim; i++) put(D, out, h * head_dim + i, ((float *)sums[h])[i] / weights[h]);
}

/* The common sizes of heads are compiled by themselves. */
INLINE void attend_sized(int D, const void *queries, const void *keys, const void *values, const int64_t *slots,
                         long num_slots, long stride, long num_heads, long head_dim, float scale, float cap, void *out) {
    switch (head_dim) {
    case 64: attend_heads(D, queries, keys, values, slots, num_slots, stride, num_heads, 64, scale, cap, out); break;
    case 128: attend_heads(D, queries, keys, values, slots, num_slots, stride, num_heads, 128, scale, cap, out); break;
    default: attend_heads(D, queries, keys, values, slots, num_slots, stride, num_heads, head_dim, scale, cap, out);
    }
}

void torchrelay_attend(int dtype, const void *queries, const void *kv, long plane, const int64_t *rows,
                       const int64_t *const *slots, const int64_t *num_slots, long num_rows, long num_heads,
                       long num_kv_heads, long head_dim, float scale, float cap, void *out) {
    long group = num_heads / num_kv_heads, parts = (group + HEADS - 1) / HEADS, num_positions = 0;
    for (long r = 0; r < num_rows; r++) num_positions += num_slots[r];
#pragma omp parallel for schedule(dynamic) if (num_positions * num_kv_heads * head_dim > SMALL)
    for (long each = 0; each < num_rows * num_kv_heads * parts; each++) {
        long r = each / parts / num_kv_heads, kv_head = each / parts % num_kv_heads, head = each % parts * HEADS;
        long count = group - head < HEADS ? group - head : HEADS;
        long own = (rows[r] * num_heads + kv_head * group + head) * head_dim, first = kv_head * head_dim;
        BY_DTYPE(dtype, attend_sized(D, at(D, queries, own), at(D, kv, first), at(D, kv, plane + first), slots[r],
                                     num_slots[r], num_kv_heads * head_dim, count, head_dim, scale, cap,
                                     place(D, out, own)));
    }
}

/* A whole layer of rows that each are the last of their sequence
 *
 * As one call: between calls Python runs with whatever the weights that streamed by have left in the cache, which made
 * each cost thirty microseconds.
 */

/* As kernels.py has them; what a model has not is NULL. */
struct layer {
    const void *input_norm, *qkv, *qkv_bias, *qk_norm, *o, *attention_out_norm, *post_norm, *gate_up, *down, *mlp_out_norm;
};

struct shape {
    long hidden, heads, kv_heads, head_dim, intermediate;
    float eps, scale, cap;
    int dtype, unit_offset, is_silu;
};

struct rows {
    long count;
    const void *cos, *sin;
    const int64_t *write_slots, *places;
    const int64_t *const *slots;
    const int64_t *num_slots;
};

/* The next `count` 16-bit numbers of the scratch memory. */
INLINE void *next(char **memory, long count) {
    void *here = *memory;
    *memory += (2 * count + 63) / 64 * 64;
    return here;
}

INLINE void add_row(int D, const void *x, const void *added, long size, void *out) {
#pragma omp simd
    for (long i = 0; i < size; i++) put(D, out, i, get(D, x, i) + get(D, added, i));
}

void torchrelay_layer(const struct layer *w, const struct shape *s, const struct rows *b, const void *hidden, void *kv,
                      long plane, float *wide, char *memory, void *out) {
    long all = s->heads + 2 * s->kv_heads, across = s->heads * s->head_dim;
    void *normed = next(&memory, b->count * s->hidden), *given = next(&memory, b->count * s->hidden);
    void *sum = next(&memory, b->count * s->hidden), *heads = next(&memory, b->count * all * s->head_dim);
    void *queries = next(&memory, b->count * across), *attended = next(&memory, b->count * across);
    void *gate_up = next(&memory, 2 * b->count * s->intermediate), *bent = next(&memory, b->count * s->intermediate);
#define NORM(x, added, weight, sum, to)                                                                                \
    torchrelay_norm(s->dtype, x, added, weight, b->count, s->hidden, s->eps, s->unit_offset, sum, to)
#define LINEAR(x, size, weights, num_out, bias, to)                                                                    \
    torchrelay_linear(s->dtype, x, b->count, size, weights, num_out, bias, wide, to)

    NORM(hidden, NULL, w->input_norm, NULL, normed);
    LINEAR(normed, s->hidden, w->qkv, all * s->head_dim, w->qkv_bias, heads);
    torchrelay_place_heads(s->dtype, heads, w->qk_norm, s->eps, s->unit_offset, b->cos, b->sin, b->write_slots, kv,
                           plane, queries, b->count, s->heads, s->kv_heads, s->head_dim);
    torchrelay_attend(s->dtype, queries, kv, plane, b->places, b->slots, b->num_slots, b->count, s->heads, s->kv_heads,
                      s->head_dim, s->scale, s->cap, attended);
    LINEAR(attended, across, w->o, s->hidden, NULL, given);
    if (w->attention_out_norm) NORM(given, NULL, w->attention_out_norm, NULL, given);
    NORM(hidden, given, w->post_norm, sum, normed);
    LINEAR(normed, s->hidden, w->gate_up, 2 * s->intermediate, NULL, gate_up);
    torchrelay_gate(s->dtype, gate_up, b->count, s->intermediate, s->is_silu, bent);
    LINEAR(bent, s->intermediate, w->down, s->hidden, NULL, given);
    if (w->mlp_out_norm) NORM(given, NULL, w->mlp_out_norm, NULL, given);
    BY_DTYPE(s->dtype, add_row(D, sum, given, b->count * s->hidden, out));
}
