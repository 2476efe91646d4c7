/* o_t = softmax(scale · q_t·K_{≤t}ᵀ)·V_{≤t}, K and V by block table, for any mixture of decode and prefill.
 *
 * A query row goes over its keys in tiles of 16, aligned to positions, by the same operations whoever is computed beside it: scores
 * by d = 0, 1, ...; what it may not see gets the share 0, and adding 0 · v changes nothing, because the cache is finite
 * everywhere. So the result depends neither on the batch nor on the cut into chunks (docs/adr/0002).
 *
 * Keys lie in their block as [head][d][token]: 16 tokens' numbers of one d are one vector. Values lie as [head][token][d].
 */
#define KEYS 16
#ifdef __AVX512F__
#define QUERY_ROWS 8
#else
#define QUERY_ROWS 4
#endif
#define VALUE_PARTS 2 /* vectors of a value that are summed together */

/* Tokens of one sequence: rows `begin` to `begin + count` of the step, at positions `start`, `start + 1`, ... */
struct segment {
    int32_t begin, count, start, table; /* `table`: where its block numbers begin in `tables` */
};

struct attention {
    const float *q; /* [rows][stride], a row's heads side by side */
    float *out;     /* [rows][heads · dim] */
    const float *keys, *values; /* of this layer: [blocks][kv_heads][block_tokens · dim] */
    const struct segment *segments;
    const int32_t *tables;
    float *scratch; /* of thread i: `scratch_floats` from i · scratch_floats */
    ptrdiff_t stride, scratch_floats;
    int32_t segment_count, heads, kv_heads, dim, block_tokens, window;
    float scale;
};

/* A block's keys or values of one head. */
INLINE const float *block_of(const struct attention *a, const float *cache, const int32_t *table, int head, int position) {
    ptrdiff_t size = (ptrdiff_t)a->block_tokens * a->dim;
    return cache + ((ptrdiff_t)table[position / a->block_tokens] * a->kv_heads + head) * size;
}

/* Sixteen keys from `position` on, as [d][stride]: where they lie, or gathered in `scratch` where a tile is not within a block. */
static const float *key_tile(const struct attention *a, const int32_t *table, int head, int position, float *scratch, int *stride) {
    if (a->block_tokens % KEYS == 0) {
        *stride = a->block_tokens;
        return block_of(a, a->keys, table, head, position) + position % a->block_tokens;
    }
    for (int key = 0; key < KEYS; key++) {
        const float *block = block_of(a, a->keys, table, head, position + key) + (position + key) % a->block_tokens;
        for (int d = 0; d < a->dim; d++) scratch[d * KEYS + key] = block[(ptrdiff_t)d * a->block_tokens];
    }
    *stride = KEYS;
    return scratch;
}

/* Some query rows of one sequence and one head of keys: row i of them is token i / group, head i % group of the group. */
struct queries {
    const float *q[QUERY_ROWS];
    float *out[QUERY_ROWS];
    int32_t first[QUERY_ROWS], last[QUERY_ROWS]; /* keys that it may see */
};

INLINE void score_tile(const struct attention *a, const struct queries *some, const int rows, const float *keys, int stride, int position,
                       float *scores, ptrdiff_t length, vf *most) {
    vf sums[QUERY_ROWS][KEYS / WIDTH];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < KEYS / WIDTH; p++) sums[r][p] = all(0.0f);
    for (int d = 0; d < a->dim; d++)
        for (int p = 0; p < KEYS / WIDTH; p++) {
            vf key = load(keys + (ptrdiff_t)d * stride + p * WIDTH);
            for (int r = 0; r < rows; r++) sums[r][p] = fma_(all(some->q[r][d]), key, sums[r][p]);
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < KEYS / WIDTH; p++) {
            vi at = add_int(counted(), all_int(position + p * WIDTH));
            vf seen = mul(sums[r][p], all(a->scale));
            seen = where_between(at, all_int(some->first[r]), all_int(some->last[r]), seen, all(-INFINITY));
            store(scores + r * length + p * WIDTH, seen);
            most[r] = larger(seen, most[r]);
        }
}

INLINE void mix_part(const struct attention *a, const struct queries *some, const int rows, const int parts, const int32_t *table, int head,
                     int d, int begin, int end, const float *shares, ptrdiff_t length) {
    vf sums[QUERY_ROWS][VALUE_PARTS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) sums[r][p] = all(0.0f);
    for (int position = begin; position < end;) {
        const float *value = block_of(a, a->values, table, head, position) + (ptrdiff_t)(position % a->block_tokens) * a->dim + d;
        int stop = (position / a->block_tokens + 1) * a->block_tokens;
        for (stop = stop < end ? stop : end; position < stop; position++, value += a->dim)
            for (int p = 0; p < parts; p++) {
                vf one = load(value + p * WIDTH);
                for (int r = 0; r < rows; r++) sums[r][p] = fma_(all(shares[r * length + position - begin]), one, sums[r][p]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) store(some->out[r] + d + p * WIDTH, sums[r][p]);
}

INLINE void mix_values(const struct attention *a, const struct queries *some, const int rows, const int32_t *table, int head, int begin,
                       int end, const float *shares, ptrdiff_t length) {
    int d = 0;
    for (; d + VALUE_PARTS * WIDTH <= a->dim; d += VALUE_PARTS * WIDTH)
        mix_part(a, some, rows, VALUE_PARTS, table, head, d, begin, end, shares, length);
    for (; d < a->dim; d += WIDTH) mix_part(a, some, rows, 1, table, head, d, begin, end, shares, length);
}

INLINE void attend_rows(const struct attention *a, const struct queries *some, const int rows, const int32_t *table, int head,
                        float *scratch) {
    int begin = some->first[0] / KEYS * KEYS, end = (some->last[rows - 1] / KEYS + 1) * KEYS;
    ptrdiff_t length = end - begin;
    float *scores = scratch + (ptrdiff_t)a->dim * KEYS;
    vf most[QUERY_ROWS];
    for (int r = 0; r < rows; r++) most[r] = all(-INFINITY);
    for (int position = begin; position < end; position += KEYS) {
        int stride;
        const float *keys = key_tile(a, table, head, position, scratch, &stride);
        score_tile(a, some, rows, keys, stride, position, scores + position - begin, length, most);
    }
    for (int r = 0; r < rows; r++) {
        vf largest = all(largest_of(most[r])), total = all(0.0f);
        for (int i = 0; i < length; i += WIDTH) {
            vf share = power(sub(load(scores + r * length + i), largest));
            store(scores + r * length + i, share);
            total = add(total, share);
        }
        vf inverse = all(1.0f / sum_of(total));
        for (int i = 0; i < length; i += WIDTH) store(scores + r * length + i, mul(load(scores + r * length + i), inverse));
    }
    mix_values(a, some, rows, table, head, begin, end, scores, length);
}

#define ROWS_CASE(n) \
    case n: attend_rows(a, &some, n, table, head, scratch); break;

static void attend_part(void *context, int index, int thread) {
    const struct attention *a = context;
    const int group = a->heads / a->kv_heads;
    const struct segment *s = a->segments;
    int tiles;
    for (;; s++) { /* few: one a sequence */
        tiles = (s->count * group + QUERY_ROWS - 1) / QUERY_ROWS;
        if (index < tiles * a->kv_heads) break;
        index -= tiles * a->kv_heads;
    }
    int head = index / tiles, first = index % tiles * QUERY_ROWS, rows = s->count * group - first;
    if (rows > QUERY_ROWS) rows = QUERY_ROWS;
    struct queries some;
    for (int r = 0; r < rows; r++) {
        int token = (first + r) / group, of_head = head * group + (first + r) % group, position = s->start + token;
        some.q[r] = a->q + (s->begin + token) * a->stride + (ptrdiff_t)of_head * a->dim;
        some.out[r] = a->out + ((ptrdiff_t)(s->begin + token) * a->heads + of_head) * a->dim;
        some.last[r] = position;
        some.first[r] = a->window && position >= a->window ? position - a->window + 1 : 0;
    }
    const int32_t *table = a->tables + s->table;
    float *scratch = a->scratch + thread * a->scratch_floats;
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4)
#if QUERY_ROWS > 4
        ROWS_CASE(5) ROWS_CASE(6) ROWS_CASE(7) ROWS_CASE(8)
#endif
    }
}

static void attend(struct attention *a) {
    int jobs = 0;
    for (int i = 0; i < a->segment_count; i++)
        jobs += (a->segments[i].count * (a->heads / a->kv_heads) + QUERY_ROWS - 1) / QUERY_ROWS * a->kv_heads;
    parallel(attend_part, a, jobs);
}
