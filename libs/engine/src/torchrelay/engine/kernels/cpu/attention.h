/* Attention for rows that each see their own positions: decoding sequences and short prompts. */
#pragma once

#include "matmul.h" /* vectors */

/* Positions and heads processed at a time; their results, 256 bytes for each number of a head, are on the stack. */
#define POSITIONS 32
#define HEADS 16

/* Widens numbers to whole fp32 vectors, zero beyond `count`. */
INLINE void widen_line(int D, const void *from, long count, long num_vectors, float factor, floats *line) {
    float *numbers = (float *)line;
    long whole = D == F16 ? count / LANES : 0;
    for (long v = 0; v < whole; v++) line[v] = WIDENED(at(D, from, v * LANES)) * factor;
    for (long i = whole * LANES; i < count; i++) numbers[i] = get(D, from, i) * factor;
    for (long i = count; i < num_vectors * LANES; i++) numbers[i] = 0.0f;
}

/* Prefetches a head: its positions are too far apart for the hardware to detect a stream. */
INLINE void fetch_line(int D, const void *from, long count) {
    for (long i = 0; i < count; i += 64 / SIZE(D)) __builtin_prefetch(at(D, from, i));
}

/* Attends the query heads of one row that share a kv head; online softmax (Milakov and Gimelshein, 2018). */
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
        for (long p = 0; p < count; p++) {
            fetch_line(D, at(D, values, slots[p] * stride), head_dim);
            if (begin + p + POSITIONS < num_slots) fetch_line(D, at(D, keys, slots[p + POSITIONS] * stride), head_dim);
            widen_line(D, at(D, keys, slots[p] * stride), head_dim, across, 1.0f, lines[p]);
        }
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

/* Calls attend_heads, which is compiled separately for common head sizes. */
INLINE void attend_sized(int D, const void *queries, const void *keys, const void *values, const int64_t *slots,
                         long num_slots, long stride, long num_heads, long head_dim, float scale, float cap, void *out) {
    switch (head_dim) {
    case 64: attend_heads(D, queries, keys, values, slots, num_slots, stride, num_heads, 64, scale, cap, out); break;
    case 128: attend_heads(D, queries, keys, values, slots, num_slots, stride, num_heads, 128, scale, cap, out); break;
    default: attend_heads(D, queries, keys, values, slots, num_slots, stride, num_heads, head_dim, scale, cap, out);
    }
}

/* The work of a thread team, in units of one kv head of one row. */
struct heads {
    const int64_t *rows;         /* of the queries and the results */
    const int64_t *const *slots; /* seen by each of these rows */
    const int64_t *num_slots;
    long num_rows, num_heads, num_kv_heads, head_dim;
    float scale, cap;
};

INLINE void attend_by_team(int D, const struct heads *h, const void *queries, const void *kv, long plane, void *out) {
    long group = h->num_heads / h->num_kv_heads, parts = (group + HEADS - 1) / HEADS;
#pragma omp for schedule(dynamic)
    for (long each = 0; each < h->num_rows * h->num_kv_heads * parts; each++) {
        long r = each / parts / h->num_kv_heads, kv_head = each / parts % h->num_kv_heads, head = each % parts * HEADS;
        long count = group - head < HEADS ? group - head : HEADS, first = kv_head * h->head_dim;
        long own = (h->rows[r] * h->num_heads + kv_head * group + head) * h->head_dim;
        attend_sized(D, at(D, queries, own), at(D, kv, first), at(D, kv, plane + first), h->slots[r], h->num_slots[r],
                     h->num_kv_heads * h->head_dim, count, h->head_dim, h->scale, h->cap, place(D, out, own));
    }
}

void torchrelay_attend(int dtype, const void *queries, const void *kv, long plane, const int64_t *rows,
                       const int64_t *const *slots, const int64_t *num_slots, long num_rows, long num_heads,
                       long num_kv_heads, long head_dim, float scale, float cap, void *out) {
    struct heads heads = {rows, slots, num_slots, num_rows, num_heads, num_kv_heads, head_dim, scale, cap};
    long num_positions = 0;
    for (long r = 0; r < num_rows; r++) num_positions += num_slots[r];
#pragma omp parallel if (num_positions * num_kv_heads * head_dim > SMALL)
    BY_DTYPE(dtype, attend_by_team(D, &heads, queries, kv, plane, out));
}
