/* What a layer computes on an x86-64 CPU, where torch's own steps cost more than reading the weights does.
 *
 * Weights are read from where they lie, once, and widened to fp32 on their way into the core; sums are fp32, in an order
 * that does not depend on how many rows are computed together. Results are rounded where the plain steps of model.py
 * and mlp.py round. What is not finite stays so.
 *
 * Called from kernels.py, which has the shapes. OpenMP's team is torch's own: both load libgomp.so.1.
 */
#include "attention.h"
#include "products.h"
#include "steps.h"

/* A whole layer of rows that each are the last of their sequence
 *
 * As one call: between calls Python runs with whatever the weights that streamed by have left in the cache, which made
 * each cost twice what it costs alone.
 */

/* As layer.py has them; what a model has not is NULL. */
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
