/* A whole pass of a decoder-only transformer (appliance/engine/models/decoder.py says which) with 8-bit weights, in one call.
 *
 * Between two products, everything that concerns a row alone is done in one go: residual, norm, rope, gate, quantisation. A layer is
 * four products, attention, and these; each is a job of the pool, and one row alone does them without it.
 *
 * Compiled once for each kind of processor (build.py). The structures are library.py's, field by field.
 */
#include "threads.h"
#include "vector.h"
#include "int8.h"
#include "attention.h"
#ifdef __SANITIZE_ADDRESS__ /* tests/engine/test_int8_passes.py: between the parts of the workspace lies what nobody may touch */
#include <sanitizer/asan_interface.h>
#define GAP_BYTES 64
#define close_off(from, bytes) ASAN_POISON_MEMORY_REGION(from, bytes)
#else
#define GAP_BYTES 0
#define close_off(from, bytes) ((void)0)
#endif

#define OPEN 1 /* the word of a block that its one holder may write */

struct layer {
    const float *input_norm, *qk_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm; /* any but the two of llama may be NULL */
    struct matrix qkv, out, gate_up, down;
    int32_t window, turn; /* `turn`: which of the step's rotations */
};

struct model {
    const struct layer *layers;
    int32_t layer_count, hidden, intermediate, heads, kv_heads, dim, gelu;
    float eps, scale;
};

struct step {
    float *x; /* [rows][hidden]: embeddings in, the last layer's result out */
    const int64_t *positions;
    const int64_t *write_rows, *write_blocks, *write_offsets; /* what of the rows is kept, and where */
    const struct segment *segments;
    const int32_t *tables;
    const float *const *turns; /* [which][position][dim]: cosines, then sines, half of dim each */
    float *cache;              /* [layer][keys, values][blocks][kv_heads][block_tokens · dim] */
    ptrdiff_t side_floats;     /* of a layer's keys */
    char *workspace;
    const int32_t *words; /* of all blocks: kernels/refcount */
    int32_t *refused;     /* counts writes that were not to be */
    int32_t rows, write_count, segment_count, block_tokens, most_keys, block_count;
};

/* What one pass works on; the buffers lie in the workspace. */
struct pass {
    const struct model *model;
    const struct step *step;
    const struct layer *layer;
    struct quantised narrow, mixed_q, wide; /* [rows] of hidden, of heads · dim, of intermediate */
    float *qkv, *mixed, *change, *gate_up, *rows_scratch, *attention_scratch;
    ptrdiff_t scratch_floats, attention_floats;
};

INLINE int most(int a, int b) { return a > b ? a : b; }

/* The workspace while it is handed out; with `from` NULL it is only counted. */
struct room {
    char *from;
    size_t used;
};

/* Lines of the processor's caches have 64 bytes, and no two parts share one. */
static void *take(struct room *room, ptrdiff_t bytes) {
    size_t begin = room->used, end = begin + (size_t)bytes;
    room->used = (end + 63) / 64 * 64 + GAP_BYTES;
    if (!room->from) return NULL;
    close_off(room->from + end, room->used - end);
    return room->from + begin;
}

static struct quantised take_quantised(struct room *room, ptrdiff_t rows, int32_t columns) {
    ptrdiff_t bytes = rows * (columns / GROUP) * 4;
    int8_t *q = take(room, rows * columns);
    float *scales = take(room, bytes);
    return (struct quantised){q, scales, take(room, bytes), columns};
}

/* Returns how many bytes there are. `most_keys` is a multiple of KEYS. */
static size_t lay_out(struct pass *p, const struct model *m, ptrdiff_t rows, int most_keys, char *from) {
    struct room room = {from, 0};
    int heads = m->heads * m->dim, turned = (m->heads + 2 * m->kv_heads) * m->dim, threads = atomic_load(&pool.threads);
    p->scratch_floats = most(m->hidden, m->intermediate);
    p->attention_floats = (ptrdiff_t)MOST_TOGETHER * m->dim * KEYS + (ptrdiff_t)QUERY_ROWS * most_keys;
    p->narrow = take_quantised(&room, rows, m->hidden);
    p->mixed_q = take_quantised(&room, rows, heads);
    p->wide = take_quantised(&room, rows, m->intermediate);
    p->qkv = take(&room, rows * turned * 4);
    p->mixed = take(&room, rows * heads * 4);
    p->change = take(&room, rows * m->hidden * 4);
    p->gate_up = take(&room, rows * 2 * m->intermediate * 4);
    p->rows_scratch = take(&room, threads * p->scratch_floats * 4);
    p->attention_scratch = take(&room, threads * p->attention_floats * 4);
    return room.used;
}

static void normed(const struct pass *p, int row, int thread, const float *norm) {
    float *scratch = p->rows_scratch + thread * p->scratch_floats;
    rms_norm(p->step->x + (ptrdiff_t)row * p->model->hidden, norm, p->model->eps, p->model->hidden, scratch);
    quantise(scratch, p->narrow, row);
}

/* x += change, which may be normed first. */
static void add_back(const struct pass *p, int row, const float *post_norm) {
    const int n = p->model->hidden;
    float *x = p->step->x + (ptrdiff_t)row * n, *change = p->change + (ptrdiff_t)row * n;
    if (post_norm) rms_norm(change, post_norm, p->model->eps, n, change);
    for (int i = 0; i < n; i += WIDTH) store(x + i, add(load(change + i), load(x + i)));
}

/* x·cos + swap(x)·sin±, in place; half of dim is a multiple of 8 at least. */
static void turn_head(float *restrict x, const float *restrict cos, int dim) {
    const float *restrict sin = cos + dim / 2;
    float *restrict y = x + dim / 2;
    for (int i = 0; i < dim / 2; i++) {
        float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

static void keep(const struct pass *p, const float *k, const float *v, int64_t block, int64_t offset) {
    const struct model *m = p->model;
    const struct step *s = p->step;
    ptrdiff_t size = (ptrdiff_t)s->block_tokens * m->dim;
    float *keys = s->cache + (p->layer - m->layers) * 2 * s->side_floats + block * m->kv_heads * size, *values = keys + s->side_floats;
    for (int head = 0; head < m->kv_heads; head++, k += m->dim, v += m->dim, keys += size, values += size) {
        for (int d = 0; d < m->dim; d++) keys[(ptrdiff_t)d * s->block_tokens + offset] = k[d];
        memcpy(values + offset * m->dim, v, (size_t)m->dim * sizeof(float));
    }
}

static void before_qkv(void *context, int row, int thread) {
    const struct pass *p = context;
    normed(p, row, thread, p->layer->input_norm);
}

static void after_qkv(void *context, int row, int thread) {
    (void)thread;
    const struct pass *p = context;
    const struct model *m = p->model;
    const int turned = m->heads + m->kv_heads;
    float *heads = p->qkv + (ptrdiff_t)row * (turned + m->kv_heads) * m->dim;
    const float *cos = p->step->turns[p->layer->turn] + p->step->positions[row] * m->dim;
    for (int head = 0; head < turned; head++) {
        float *x = heads + (ptrdiff_t)head * m->dim;
        if (p->layer->qk_norm) rms_norm(x, p->layer->qk_norm + (ptrdiff_t)head * m->dim, m->eps, m->dim, x);
        turn_head(x, cos, m->dim);
    }
}

/* The plan has judged all of them (kernels/kv_write): what does not lie in an open block here went astray after that. */
static int may_write(const struct step *s, int64_t block, int64_t offset) {
    return block >= 0 && block < s->block_count && offset >= 0 && offset < s->block_tokens && s->words[block] == OPEN;
}

static void write_row(void *context, int index, int thread) {
    (void)thread;
    const struct pass *p = context;
    const struct model *m = p->model;
    const struct step *s = p->step;
    if (!may_write(s, s->write_blocks[index], s->write_offsets[index])) {
        __atomic_fetch_add(s->refused, 1, __ATOMIC_RELAXED);
        return;
    }
    const float *k = p->qkv + (s->write_rows[index] * (m->heads + 2 * m->kv_heads) + m->heads) * m->dim;
    keep(p, k, k + (ptrdiff_t)m->kv_heads * m->dim, s->write_blocks[index], s->write_offsets[index]);
}

static void after_attention(void *context, int row, int thread) {
    (void)thread;
    const struct pass *p = context;
    quantise(p->mixed + (ptrdiff_t)row * p->mixed_q.columns, p->mixed_q, row);
}

static void before_mlp(void *context, int row, int thread) {
    const struct pass *p = context;
    add_back(p, row, p->layer->attention_post_norm);
    normed(p, row, thread, p->layer->mlp_norm);
}

static void after_gate_up(void *context, int row, int thread) {
    const struct pass *p = context;
    const int n = p->model->intermediate;
    const float *gate = p->gate_up + (ptrdiff_t)row * 2 * n, *up = gate + n;
    float *y = p->rows_scratch + thread * p->scratch_floats;
    if (p->model->gelu)
        for (int i = 0; i < n; i += WIDTH) store(y + i, mul(gelu(load(gate + i)), load(up + i)));
    else
        for (int i = 0; i < n; i += WIDTH) store(y + i, mul(silu(load(gate + i)), load(up + i)));
    quantise(y, p->wide, row);
}

static void after_down(void *context, int row, int thread) {
    const struct pass *p = context;
    add_back(p, row, p->layer->mlp_post_norm);
    if (p->layer + 1 < p->model->layers + p->model->layer_count) normed(p, row, thread, p->layer[1].input_norm);
}

#define NO_JOB 2      /* rows, so few that a job of the pool costs more than they do */
#define MOST_A_JOB 16 /* rows; together, because neighbours' numbers share lines of the processor's caches */

struct rows {
    job_t job;
    struct pass *pass;
    int count, a_job;
};

static void row_after_row(void *context, int index, int thread) {
    const struct rows *rows = context;
    int end = (index + 1) * rows->a_job;
    if (end > rows->count) end = rows->count;
    for (int row = index * rows->a_job; row < end; row++) rows->job(rows->pass, row, thread);
}

static void rows_by(int a_job, job_t job, struct pass *p, int count) {
    struct rows rows = {job, p, count, a_job};
    parallel(row_after_row, &rows, (count + a_job - 1) / a_job);
}

static void each_row(job_t job, struct pass *p, int count) {
    int a_job = count <= NO_JOB ? NO_JOB : count / (4 * atomic_load(&pool.threads)) + 1;
    rows_by(a_job < MOST_A_JOB ? a_job : MOST_A_JOB, job, p, count);
}

static void run_layer(struct pass *p) {
    const struct model *m = p->model;
    const struct step *s = p->step;
    const struct layer *layer = p->layer;
    const float *keys = s->cache + (layer - m->layers) * 2 * s->side_floats;
    struct attention a = {
        .q = p->qkv, .out = p->mixed, .keys = keys, .values = keys + s->side_floats, .segments = s->segments, .tables = s->tables,
        .scratch = p->attention_scratch, .stride = (ptrdiff_t)(m->heads + 2 * m->kv_heads) * m->dim, .scratch_floats = p->attention_floats,
        .segment_count = s->segment_count, .heads = m->heads, .kv_heads = m->kv_heads, .dim = m->dim, .block_tokens = s->block_tokens,
        .window = layer->window, .scale = m->scale,
    };
    linear(p->narrow, s->rows, &layer->qkv, p->qkv);
    each_row(after_qkv, p, s->rows);
    rows_by(KEYS, write_row, p, s->write_count); /* tokens side by side in a line: not for two threads at a time */
    attend(&a);
    each_row(after_attention, p, s->rows);
    linear(p->mixed_q, s->rows, &layer->out, p->change);
    each_row(before_mlp, p, s->rows);
    linear(p->narrow, s->rows, &layer->gate_up, p->gate_up);
    each_row(after_gate_up, p, s->rows);
    linear(p->wide, s->rows, &layer->down, p->change);
    each_row(after_down, p, s->rows);
}

/* By which library.py knows that this was compiled of the same structures. */
int32_t layout(void) { return (int32_t)(sizeof(struct step) + 1000 * sizeof(struct model) + 1000000 * sizeof(struct layer)); }

/* Bytes of workspace that `forward` wants for so many rows that look at no more keys than these. */
size_t workspace_bytes(const struct model *model, int32_t rows, int32_t most_keys) {
    struct pass p;
    return lay_out(&p, model, rows, most_keys, NULL);
}

/* All layers: step->x goes through them, keys and values are kept. */
void forward(const struct model *model, const struct step *step) {
    struct pass p = {.model = model, .step = step, .layer = model->layers};
    lay_out(&p, model, step->rows, step->most_keys, step->workspace);
    each_row(before_qkv, &p, step->rows);
    for (; p.layer < model->layers + model->layer_count; p.layer++) run_layer(&p);
}

static size_t lay_out_apply(struct quantised *q, float **row, int rows, int columns, char *from) {
    struct room room = {from, 0};
    *q = take_quantised(&room, rows, columns);
    *row = take(&room, (ptrdiff_t)columns * 4);
    return room.used;
}

/* Bytes of workspace that `apply` wants. */
size_t apply_bytes(int32_t rows, int32_t columns) {
    struct quantised q;
    float *row;
    return lay_out_apply(&q, &row, rows, columns, NULL);
}

/* y = x·Wᵀ + b for rows of x as they are, or normed first: the output layer, and what tests compare. y is [rows][w->rows]. */
void apply(const float *x, int32_t rows, const struct matrix *w, const float *norm, float eps, float *y, char *workspace) {
    const int columns = w->columns;
    struct quantised q;
    float *row;
    lay_out_apply(&q, &row, rows, columns, workspace);
    for (int i = 0; i < rows; i++) {
        if (norm) rms_norm(x + (ptrdiff_t)i * columns, norm, eps, columns, row);
        quantise(norm ? row : x + (ptrdiff_t)i * columns, q, i);
    }
    linear(q, rows, w, y);
}
