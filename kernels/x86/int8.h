/* y = x·Wᵀ + b, W and x in 8 bits: y_n = Σ_g s_x[g] · s_w[n, g] · Σ_{k in g} q_x[k] · q_w[n, k] + b_n.
 *
 * Groups g are GROUP consecutive k. s = (largest magnitude of the group) / 127, q = round(number / s): a row of x is quantised by
 * its own numbers alone. The inner sum is of whole numbers, so it is exact in any order and on any processor; the outer one is taken
 * in the order of g. So a row of y does not depend on the other rows (docs/adr/0002).
 *
 * W is packed for the instruction that multiplies four bytes of x by four bytes of each of many columns: panels of 16 rows of W,
 * [panel][k / 4][16][4], as q_w + 128, because that instruction takes one side unsigned; 128 · Σ q_x is taken off again.
 * Scales are [panel][g][16].
 */
#define GROUP 32
#define STEPS (GROUP / 4)
#define LEAST 1e-30f /* of a group: with less, 127 / largest is no number */

struct matrix {
    const uint8_t *packed;
    const uint16_t *scales;
    const float *bias;     /* may be NULL */
    int32_t rows, columns; /* of W; rows in full panels, columns in full groups */
};

/* Rows of x, quantised: q is [rows][columns], scales and offsets (−128 · Σ q_x) are [rows][columns / GROUP]. */
struct quantised {
    int8_t *q;
    float *scales;
    int32_t *offsets;
    int32_t columns;
};

static void quantise(const float *x, struct quantised to, int row) {
    int8_t *q = to.q + (ptrdiff_t)row * to.columns;
    for (int g = 0; g < to.columns / GROUP; g++) {
        vi total = all_int(0);
        float largest = magnitude_of(x + g * GROUP, GROUP), inverse = largest > LEAST ? 127.0f / largest : 0.0f;
        for (int k = 0; k < GROUP; k += WIDTH) {
            vi rounded = to_int(mul(load(x + g * GROUP + k), all(inverse)));
            total = add_int(total, rounded);
            store_bytes(q + g * GROUP + k, rounded);
        }
        to.scales[row * (to.columns / GROUP) + g] = largest / 127.0f;
        to.offsets[row * (to.columns / GROUP) + g] = (int32_t)(-128u * (uint32_t)total_of(total)); /* of NaNs it wraps */
    }
}

/* sum + four products in each 32 bits; w unsigned with 128 added, x signed. */
#if defined(__AVX512VNNI__)
#define TILE_PANELS 2
#define dot(sum, w, x) _mm512_dpbusd_epi32(sum, w, x)
#define OFFSET(offset) (offset)
#elif defined(__AVXVNNI__)
#define TILE_PANELS 1
#define dot(sum, w, x) _mm256_dpbusd_avx_epi32(sum, w, x)
#define OFFSET(offset) (offset)
#else
/* The older instruction adds pairs in 16 bits: |w| · (±x) ≤ 2 · 127 · 127 fits, 255 · 127 would not. */
#define TILE_PANELS 1
#define OFFSET(offset) 0
INLINE vi dot(vi sum, vi w, vi x) {
    vi with_sign = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    vi pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(with_sign), _mm256_sign_epi8(x, with_sign));
    return add_int(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#define TILE_ROWS 5

/* A product waits for W to come from memory, all the time with few rows and at the first of more: the processor does not ask for
   enough of it by itself. */
#define FEW_ROWS 16
#define AHEAD_BYTES 3072
INLINE void fetch_ahead(const uint8_t *packed, const uint16_t *scales) {
    UNROLL
    for (int s = 0; s < STEPS; s++) fetch((const char *)packed + s * 4 * PANEL + AHEAD_BYTES);
    fetch((const char *)scales + AHEAD_BYTES / GROUP * sizeof *scales);
}

/* `rows` of x by `panels` of W. Unrolled altogether, so that dots and sums stay in registers: in memory they take twice as long. */
INLINE void tile(const int rows, const int panels, const int ahead, struct quantised x, int row, const struct matrix *w, int panel,
                 float *y, ptrdiff_t ldy) {
    const int groups = w->columns / GROUP;
    const uint8_t *packed = w->packed + (ptrdiff_t)panel * PANEL * w->columns;
    const int8_t *q = x.q + (ptrdiff_t)row * w->columns;
    vf sums[TILE_ROWS][TILE_PANELS * PARTS];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < panels * PARTS; p++) sums[r][p] = w->bias ? load(w->bias + panel * PANEL + p * WIDTH) : all(0.0f);
    for (int g = 0; g < groups; g++) {
        vi dots[TILE_ROWS][TILE_PANELS * PARTS];
        UNROLL
        for (int r = 0; r < rows; r++)
            UNROLL
            for (int p = 0; p < panels * PARTS; p++) dots[r][p] = all_int(OFFSET(x.offsets[(row + r) * groups + g]));
        if (ahead) {
            UNROLL
            for (int p = 0; p < panels; p++)
                fetch_ahead(packed + ((ptrdiff_t)p * w->columns + g * GROUP) * PANEL,
                            w->scales + ((ptrdiff_t)(panel + p) * groups + g) * PANEL);
        }
        UNROLL
        for (int s = g * STEPS; s < (g + 1) * STEPS; s++) {
            vi four[TILE_PANELS * PARTS];
            UNROLL
            for (int p = 0; p < panels * PARTS; p++)
                four[p] = load_int(packed + (ptrdiff_t)(p / PARTS) * PANEL * w->columns + s * 4 * PANEL + p % PARTS * 4 * WIDTH);
            UNROLL
            for (int r = 0; r < rows; r++) {
                int32_t bytes;
                memcpy(&bytes, q + (ptrdiff_t)r * w->columns + s * 4, 4);
                UNROLL
                for (int p = 0; p < panels * PARTS; p++) dots[r][p] = dot(dots[r][p], four[p], all_int(bytes));
            }
        }
        UNROLL
        for (int p = 0; p < panels * PARTS; p++) {
            vf scale = load_half(w->scales + ((ptrdiff_t)(panel + p / PARTS) * groups + g) * PANEL + p % PARTS * WIDTH);
            UNROLL
            for (int r = 0; r < rows; r++)
                sums[r][p] = fma_(to_float(dots[r][p]), mul(scale, all(x.scales[(row + r) * groups + g])), sums[r][p]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < panels * PARTS; p++) store(y + r * ldy + p * WIDTH, sums[r][p]);
}

#define TILE_CASE(n) \
    case n: tile(n, panels, ahead, x, row, w, panel, y, ldy); break;
INLINE void some_rows(int rows, const int panels, const int ahead, struct quantised x, int row, const struct matrix *w, int panel,
                      float *y, ptrdiff_t ldy) {
    switch (rows) {
        TILE_CASE(1) TILE_CASE(2) TILE_CASE(3) TILE_CASE(4) TILE_CASE(5)
    }
}

struct product {
    struct quantised x;
    const struct matrix *w;
    float *y;
    int32_t rows, panels; /* of x, and of W a job */
};

/* All rows of x by some panels of W, so that W comes from memory once. */
static void product_part(void *context, int index, int thread) {
    (void)thread;
    const struct product *job = context;
    int panel = index * job->panels, end = job->w->rows / PANEL, tiles = (job->rows + TILE_ROWS - 1) / TILE_ROWS,
        few = job->rows <= FEW_ROWS;
    if (end > panel + job->panels) end = panel + job->panels;
    while (panel < end) {
        int panels = end - panel >= TILE_PANELS ? TILE_PANELS : 1;
        for (int t = 0; t < tiles; t++) { /* about as many rows in each */
            int row = job->rows * t / tiles, rows = job->rows * (t + 1) / tiles - row, ahead = few || t == 0;
            float *y = job->y + (ptrdiff_t)row * job->w->rows + panel * PANEL;
            if (panels == TILE_PANELS) some_rows(rows, TILE_PANELS, ahead, job->x, row, job->w, panel, y, job->w->rows);
            else some_rows(rows, 1, ahead, job->x, row, job->w, panel, y, job->w->rows);
        }
        panel += panels;
    }
}

#define MOST_JOBS 64 /* of few rows: more cost more than they share out better */

/* y[rows][w->rows]. */
static void linear(struct quantised x, int rows, const struct matrix *w, float *y) {
    struct product job = {x, w, y, rows, 2};
    const int panels = w->rows / PANEL;
    while (rows <= FEW_ROWS && panels > MOST_JOBS * job.panels) job.panels *= 2;
    parallel(product_part, &job, (panels + job.panels - 1) / job.panels);
}

struct packing {
    const float *weight;
    int32_t rows, columns;
    uint8_t *packed;
    uint16_t *scales;
};

/* A scale of weights as it is kept: the upper half of a float, the next one upwards, so that no number exceeds 127. A weight that is
   no number makes its whole group none: it is not to get lost. */
INLINE float upper_half(float scale, uint16_t *half) {
    uint32_t bits;
    if (!isfinite(scale)) scale = NAN;
    memcpy(&bits, &scale, sizeof bits);
    *half = (uint16_t)((bits + 0xffff) >> 16);
    bits = (uint32_t)*half << 16;
    memcpy(&scale, &bits, sizeof bits);
    return scale;
}

static void pack_panel(void *context, int index, int thread) {
    (void)thread;
    const struct packing *job = context;
    const int groups = job->columns / GROUP;
    uint8_t *to = job->packed + (ptrdiff_t)index * PANEL * job->columns;
    for (int n = 0; n < PANEL; n++) {
        int row = index * PANEL + n;
        const float *from = job->weight + (ptrdiff_t)row * job->columns;
        for (int g = 0; g < groups; g++) {
            float values[GROUP] __attribute__((aligned(64))) = {0};
            if (row < job->rows) memcpy(values, from + g * GROUP, sizeof values);
            float largest = magnitude_of(values, GROUP);
            float scale = upper_half(largest / 127.0f, &job->scales[((ptrdiff_t)index * groups + g) * PANEL + n]);
            float inverse = largest > LEAST ? 1.0f / scale : 0.0f;
            for (int k = 0; k < GROUP; k++)
                to[((g * GROUP + k) / 4 * PANEL + n) * 4 + k % 4] = (uint8_t)(128 + (int)_mm_cvtss_si32(_mm_set_ss(values[k] * inverse)));
        }
    }
}

/* packed: [panels][columns / 4][16][4], scales: [panels][columns / GROUP][16]; rows are filled up to full panels with zeros. */
void pack(const float *weight, int32_t rows, int32_t columns, uint8_t *packed, uint16_t *scales) {
    struct packing job = {weight, rows, columns, packed, scales};
    parallel(pack_panel, &job, (rows + PANEL - 1) / PANEL);
}
