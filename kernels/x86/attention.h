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
#define SUMS WIDTH      /* vectors of sums that registers hold beside what is added to them */
#define MOST_TOGETHER 4 /* tiles of keys, or vectors of a value */
#define AHEAD_TILES 4

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

/* What these queries go over: whole tiles of one head of keys, first keys[begin:end], then the values. */
struct sight {
    const int32_t *table;
    int head, begin, end, alone; /* `alone`: nobody else goes over them, so that they come from memory for this */
};

/* Ask for the tile that is needed AHEAD_TILES later: blocks lie apart, so the processor does not foresee it. */
INLINE void fetch_tile(const struct attention *a, const struct sight *s, int tile) {
    int tiles = (s->end - s->begin) / KEYS, position = s->begin + tile % tiles * KEYS;
    if (!s->alone || tile >= 2 * tiles || a->block_tokens % KEYS) return;
    int side = tile < tiles, stride = side ? a->block_tokens : KEYS, at = position % a->block_tokens * (side ? 1 : a->dim);
    const float *from = block_of(a, side ? a->keys : a->values, s->table, s->head, position) + at;
    for (int d = 0; d < a->dim; d++) fetch((const char *)(from + (ptrdiff_t)d * stride));
}

INLINE void score_tiles(const struct attention *a, const struct queries *some, const int rows, const int tiles, const struct sight *s,
                        int position, float *scratch, float *scores, vf *most) {
    const int parts = tiles * PARTS;
    const float *keys[MOST_TOGETHER];
    int stride;
    vf sums[QUERY_ROWS][MOST_TOGETHER * PARTS];
    UNROLL
    for (int t = 0; t < tiles; t++) {
        int tile = position + t * KEYS;
        keys[t] = key_tile(a, s->table, s->head, tile, scratch + (ptrdiff_t)t * a->dim * KEYS, &stride);
        fetch_tile(a, s, (tile - s->begin) / KEYS + AHEAD_TILES);
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < parts; p++) sums[r][p] = all(0.0f);
    for (int d = 0; d < a->dim; d++)
        UNROLL
        for (int p = 0; p < parts; p++) {
            vf key = load(keys[p / PARTS] + (ptrdiff_t)d * stride + p % PARTS * WIDTH);
            UNROLL
            for (int r = 0; r < rows; r++) sums[r][p] = fma_(all(some->q[r][d]), key, sums[r][p]);
        }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < parts; p++) {
            vi at = add_int(counted(), all_int(position + p * WIDTH));
            vf seen = mul(sums[r][p], all(a->scale));
            seen = where_between(at, all_int(some->first[r]), all_int(some->last[r]), seen, all(-INFINITY));
            store(scores + r * (ptrdiff_t)(s->end - s->begin) + position - s->begin + p * WIDTH, seen);
            most[r] = larger(seen, most[r]);
        }
}

/* Σ share · v of some vectors of d; shares are [rows][keys that are gone over]. */
INLINE void mix_part(const struct attention *a, const struct queries *some, const int rows, const int parts, const struct sight *s, int d,
                     const float *shares) {
    const ptrdiff_t length = s->end - s->begin;
    vf sums[QUERY_ROWS][MOST_TOGETHER];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < parts; p++) sums[r][p] = all(0.0f);
    for (int position = s->begin; position < s->end;) {
        int in_block = position % a->block_tokens, in_tile = position % KEYS;
        int count = a->block_tokens - in_block < KEYS - in_tile ? a->block_tokens - in_block : KEYS - in_tile;
        const float *value = block_of(a, a->values, s->table, s->head, position) + (ptrdiff_t)in_block * a->dim + d;
        const float *share = shares + position - s->begin;
        if (d == 0) fetch_tile(a, s, (s->end + position - 2 * s->begin) / KEYS + AHEAD_TILES);
        for (int i = 0; i < count; i++)
            UNROLL
            for (int p = 0; p < parts; p++) {
                vf one = load(value + (ptrdiff_t)i * a->dim + p * WIDTH);
                UNROLL
                for (int r = 0; r < rows; r++) sums[r][p] = fma_(all(share[r * length + i]), one, sums[r][p]);
            }
        position += count;
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < parts; p++) store(some->out[r] + d + p * WIDTH, sums[r][p]);
}

/* How many to do together, so that there are sums enough to be busy and no more than registers hold. */
INLINE int together(int sums) { return sums * MOST_TOGETHER <= SUMS ? MOST_TOGETHER : sums * 2 <= SUMS ? 2 : 1; }

INLINE void attend_rows(const struct attention *a, const struct queries *some, const int rows, struct sight s, float *scratch) {
    const int tiles = together(rows * PARTS), parts = together(rows);
    s.begin = some->first[0] / KEYS * KEYS, s.end = (some->last[rows - 1] / KEYS + 1) * KEYS;
    const ptrdiff_t length = s.end - s.begin;
    float *scores = scratch + (ptrdiff_t)MOST_TOGETHER * a->dim * KEYS;
    vf most[QUERY_ROWS];
    for (int tile = 0; tile < AHEAD_TILES; tile++) fetch_tile(a, &s, tile);
    for (int r = 0; r < rows; r++) most[r] = all(-INFINITY);
    int position = s.begin;
    for (; position + tiles * KEYS <= s.end; position += tiles * KEYS)
        score_tiles(a, some, rows, tiles, &s, position, scratch, scores, most);
    for (; position < s.end; position += KEYS) score_tiles(a, some, rows, 1, &s, position, scratch, scores, most);
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
    int d = 0;
    for (; d + parts * WIDTH <= a->dim; d += parts * WIDTH) mix_part(a, some, rows, parts, &s, d, scores);
    for (; d < a->dim; d += WIDTH) mix_part(a, some, rows, 1, &s, d, scores);
}

#define ROWS_CASE(n) \
    case n: attend_rows(a, &some, n, sight, scratch); break;

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
    struct sight sight = {.table = a->tables + s->table, .head = head, .alone = tiles == 1};
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
