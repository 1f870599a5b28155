/* Kernels of a decoder layer for x86-64 CPUs, where torch's operations cost more than reading the weights.
 *
 * Weights are read once, in place, and widened to fp32 on their way into the core. Sums are fp32, in an order that does
 * not depend on how many rows are computed together. Results are rounded where the plain operations of model/decoder.py
 * and model/mlp.py round. NaN and infinity propagate.
 *
 * Called from library.py, which declares the arguments. The OpenMP team is torch's: both load libgomp.so.1.
 */
#include "attention.h"
#include "low_rank.h"
#include "matmul.h"
#include "ops.h"

/* Whole layers, for rows that each see their own positions
 *
 * One call with one thread team computes them: between calls Python runs on a cache that the weights have swept, or
 * waits for its lock.
 */

/* The weights in the order of layers.py; NULL for weights that a model does not have. */
struct layer {
    const void *input_norm, *qkv, *qkv_bias, *qk_norm, *o, *attention_out_norm, *post_norm, *gate_up, *down, *mlp_out_norm;
    const float *qkv_scales, *o_scales, *gate_up_scales, *down_scales; /* of weights in int8 */
};

struct shape {
    long hidden, heads, kv_heads, head_dim, intermediate;
    float eps, scale, cap;
    int dtype, unit_offset, is_silu;
};

/* The rows as layers of one kind see them. */
struct view {
    const void *cos, *sin;
    const int64_t *rows;
    const int64_t *const *slots;
    const int64_t *num_slots;
};

struct batch {
    long num_rows;
    const int64_t *write_slots;
    const struct view *views;
    void *hidden, *kv;
    long layer_stride, plane; /* of kv, in numbers */
    floats *wide;
    char *memory;
    const int64_t *change; /* NULL, or a number that changes when the cores must be divided again */
    int64_t change_seen;
    const struct changes *const *adapters; /* NULL, or as torchrelay_adapt takes them */
};

/* Intermediate results. */
struct steps {
    void *normed, *given, *sum, *heads, *queries, *attended, *gate_up, *gated;
};

/* Takes the next `count` 16-bit numbers of the memory. */
INLINE void *next(char **memory, long count) {
    void *here = *memory;
    *memory += (2 * count + 63) / 64 * 64;
    return here;
}

INLINE void add_row(int D, const void *x, const void *added, long size, void *out) {
#pragma omp simd
    for (long i = 0; i < size; i++) put(D, out, i, get(D, x, i) + get(D, added, i));
}

INLINE void layer_by_team(int D, const struct layer *w, const struct shape *s, const struct batch *b,
                          const struct view *v, const struct steps *t, void *kv, struct taken *const taken[2], long layer) {
    long all = s->heads + 2 * s->kv_heads, across = s->heads * s->head_dim, own = all * s->head_dim;
    long in_kv = s->kv_heads * s->head_dim, half = s->head_dim / 2, inner = s->intermediate, hidden = s->hidden;
    struct heads heads = {v->rows,     v->slots,    v->num_slots, b->num_rows, s->heads,
                          s->kv_heads, s->head_dim, s->scale,     s->cap};
#define NORM(x, added, weight, sum, out) norm_row(D, x, added, weight, hidden, s->eps, s->unit_offset, sum, out)
#define ROW(of, size) place(D, t->of, r * (size))
#define HIDDEN place(D, b->hidden, r * hidden)
/* Calls `call` for each row, then widens the results for the next weights. */
#define ROWS_OF(results, size, weights, call)                                                                                   \
    _Pragma("omp for schedule(static)") for (long first = 0; first < b->num_rows; first += rows_together(b->num_rows)) { \
        for (long r = first; r < first + rows_together(b->num_rows) && r < b->num_rows; r++) call;                     \
        widen_group(D, w->weights##_scales, t->results, first, b->num_rows, size, b->wide);                                                 \
    }
#define LINEAR(turn, in, num_out, weights, bias, out)                                                                  \
    linear_by_team(D, b->num_rows, b->wide,                                                                            \
                   &(struct linear){in, num_out, w->weights, w->weights##_scales, bias, t->out, taken[turn],           \
                                    taken[1 - turn]});                                                                 \
    _Pragma("omp barrier")
#define ADAPT(group, in, size, out, num_out)                                                                           \
    if (b->adapters) {                                                                                                 \
        _Pragma("omp for schedule(static)") for (long r = 0; r < b->num_rows; r++)                                     \
            if (b->adapters[r])                                                                                        \
                adapt_row(D, b->adapters[r] + layer * GROUPS + group, ROW(in, size), size, ROW(out, num_out));         \
    }

    ROWS_OF(normed, hidden, qkv, NORM(HIDDEN, NULL, w->input_norm, NULL, ROW(normed, hidden)))
    LINEAR(0, hidden, own, qkv, w->qkv_bias, heads)
    ADAPT(QKV, normed, hidden, heads, own)
#pragma omp for
    for (long r = 0; r < b->num_rows; r++)
        place_row(D, ROW(heads, own), w->qk_norm, s->eps, s->unit_offset, at(D, v->cos, r * half), at(D, v->sin, r * half),
                  place(D, kv, b->write_slots[r] * in_kv), place(D, kv, b->plane + b->write_slots[r] * in_kv),
                  ROW(queries, across), s->heads, s->kv_heads, s->head_dim);
    attend_by_team(D, &heads, t->queries, kv, b->plane, t->attended);
    ROWS_OF(attended, across, o, {})
    LINEAR(1, across, hidden, o, NULL, given)
    ADAPT(O, attended, across, given, hidden)
    ROWS_OF(normed, hidden, gate_up, {
        if (w->attention_out_norm) NORM(ROW(given, hidden), NULL, w->attention_out_norm, NULL, ROW(given, hidden));
        NORM(HIDDEN, ROW(given, hidden), w->post_norm, ROW(sum, hidden), ROW(normed, hidden));
    })
    LINEAR(0, hidden, 2 * inner, gate_up, NULL, gate_up)
    ADAPT(GATE_UP, normed, hidden, gate_up, 2 * inner)
    ROWS_OF(gated, inner, down, gate_row(D, ROW(gate_up, 2 * inner), at(D, ROW(gate_up, 2 * inner), inner), inner, s->is_silu,
                                   ROW(gated, inner)))
    LINEAR(1, inner, hidden, down, NULL, given)
    ADAPT(DOWN, gated, inner, given, hidden)
#pragma omp for schedule(static)
    for (long r = 0; r < b->num_rows; r++) {
        if (w->mlp_out_norm) NORM(ROW(given, hidden), NULL, w->mlp_out_norm, NULL, ROW(given, hidden));
        add_row(D, ROW(sum, hidden), ROW(given, hidden), hidden, HIDDEN);
    }
#undef NORM
#undef ROW
#undef HIDDEN
#undef ROWS_OF
#undef LINEAR
#undef ADAPT
}

/* Computes `num_layers` layers from `first` on, or fewer if `change` changes meanwhile; returns their number. `kinds`
 * has the index of each layer's view. */
long torchrelay_layers(const struct layer *layers, const int64_t *kinds, long first, long num_layers,
                       const struct shape *s, const struct batch *b) {
    long all = s->heads + 2 * s->kv_heads, across = s->heads * s->head_dim, most = omp_get_max_threads();
    char *memory = b->memory;
    struct steps t = {
        .normed = next(&memory, b->num_rows * s->hidden),
        .given = next(&memory, b->num_rows * s->hidden),
        .sum = next(&memory, b->num_rows * s->hidden),
        .heads = next(&memory, b->num_rows * all * s->head_dim),
        .queries = next(&memory, b->num_rows * across),
        .attended = next(&memory, b->num_rows * across),
        .gate_up = next(&memory, 2 * b->num_rows * s->intermediate),
        .gated = next(&memory, b->num_rows * s->intermediate),
    };
    struct taken chunks[2][most], *const taken[2] = {chunks[0], chunks[1]};
    memset(chunks, 0, sizeof chunks);
#pragma omp parallel
    for (long layer = first; layer < first + __atomic_load_n(&num_layers, __ATOMIC_RELAXED); layer++) {
        /* The other threads read num_layers again after this layer's barriers. */
#pragma omp master
        if (b->change && __atomic_load_n(b->change, __ATOMIC_RELAXED) != b->change_seen)
            __atomic_store_n(&num_layers, layer - first + 1, __ATOMIC_RELAXED);
        BY_HALF(s->dtype, layer_by_team(D, &layers[layer], s, b, &b->views[kinds[layer]], &t,
                                        place(D, b->kv, layer * b->layer_stride), taken, layer));
    }
    return num_layers;
}
