/* Float vectors of the processor that this file is compiled for: 16 numbers with AVX-512, 8 without.
 *
 * Every function computes a row by the same operations in the same order wherever it is called from: compiled with
 * -ffp-contract=off, so that a product and a sum become one operation only where fma_() says so (docs/adr/0002).
 * Lengths are multiples of 16.
 */
#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16") /* a loop whose arrays are to be registers */
#define fetch(p) _mm_prefetch(p, _MM_HINT_T0)
#define PANEL 16
#define PARTS (PANEL / WIDTH)

#ifdef __AVX512F__
#define WIDTH 16
typedef __m512 vf;
typedef __m512i vi;
#define load(p) _mm512_loadu_ps(p)
#define store(p, x) _mm512_storeu_ps(p, x)
#define all(x) _mm512_set1_ps(x)
#define add(a, b) _mm512_add_ps(a, b)
#define sub(a, b) _mm512_sub_ps(a, b)
#define mul(a, b) _mm512_mul_ps(a, b)
#define divide(a, b) _mm512_div_ps(a, b)
#define fma_(a, b, c) _mm512_fmadd_ps(a, b, c)
#define larger(a, b) _mm512_max_ps(a, b)
#define smaller(a, b) _mm512_min_ps(a, b)
#define magnitude(a) _mm512_abs_ps(a)
#define to_int(a) _mm512_cvtps_epi32(a)
#define to_float(a) _mm512_cvtepi32_ps(a)
#define all_int(x) _mm512_set1_epi32(x)
#define add_int(a, b) _mm512_add_epi32(a, b)
#define load_int(p) _mm512_loadu_si512(p)
#define load_half(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define bits_of(a) _mm512_castps_si512(a)
#define larger_int(a, b) _mm512_max_epi32(a, b)
#define exponent(a) _mm512_castsi512_ps(_mm512_slli_epi32(a, 23))
#define where_at_least(a, limit, x) _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, limit, _CMP_GE_OQ), x)
#define where_between(i, first, last, x, y) \
    _mm512_mask_mov_ps(y, _mm512_cmpge_epi32_mask(i, first) & _mm512_cmple_epi32_mask(i, last), x)
#define counted() _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define store_bytes(p, a) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8(a))
#else
#define WIDTH 8
typedef __m256 vf;
typedef __m256i vi;
#define load(p) _mm256_loadu_ps(p)
#define store(p, x) _mm256_storeu_ps(p, x)
#define all(x) _mm256_set1_ps(x)
#define add(a, b) _mm256_add_ps(a, b)
#define sub(a, b) _mm256_sub_ps(a, b)
#define mul(a, b) _mm256_mul_ps(a, b)
#define divide(a, b) _mm256_div_ps(a, b)
#define fma_(a, b, c) _mm256_fmadd_ps(a, b, c)
#define larger(a, b) _mm256_max_ps(a, b)
#define smaller(a, b) _mm256_min_ps(a, b)
#define magnitude(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define to_int(a) _mm256_cvtps_epi32(a)
#define to_float(a) _mm256_cvtepi32_ps(a)
#define all_int(x) _mm256_set1_epi32(x)
#define add_int(a, b) _mm256_add_epi32(a, b)
#define load_int(p) _mm256_loadu_si256((const __m256i *)(p))
#define load_half(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define bits_of(a) _mm256_castps_si256(a)
#define larger_int(a, b) _mm256_max_epi32(a, b)
#define exponent(a) _mm256_castsi256_ps(_mm256_slli_epi32(a, 23))
#define where_at_least(a, limit, x) _mm256_and_ps(_mm256_cmp_ps(a, limit, _CMP_GE_OQ), x)
#define where_between(i, first, last, x, y) \
    _mm256_blendv_ps(x, y, _mm256_castsi256_ps(_mm256_or_si256(_mm256_cmpgt_epi32(first, i), _mm256_cmpgt_epi32(i, last))))
#define counted() _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)
INLINE void store_bytes(int8_t *p, vi a) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
#endif

/* Across a vector: its upper half onto its lower one, until one number is left. */
#ifdef __AVX512F__
#define halves(x, combine) combine(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1))
#define halves_int(x, combine) combine(_mm512_castsi512_si256(x), _mm512_extracti32x8_epi32(x, 1))
#else
#define halves(x, combine) (x)
#define halves_int(x, combine) (x)
#endif
INLINE float sum_of(vf x) {
    __m256 eight = halves(x, _mm256_add_ps);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest_of(vf x) {
    __m256 eight = halves(x, _mm256_max_ps);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE int32_t total_of(vi x) {
    __m256i eight = halves_int(x, _mm256_add_epi32);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

INLINE int32_t most_of(vi x) {
    __m256i eight = halves_int(x, _mm256_max_epi32);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

/* The largest |x| of n numbers. Compared as whole numbers, where infinity and NaN are the largest: neither gets lost. */
INLINE float magnitude_of(const float *x, int n) {
    vi most = all_int(0);
    for (int i = 0; i < n; i += WIDTH) most = larger_int(most, bits_of(magnitude(load(x + i))));
    int32_t largest = most_of(most);
    float result;
    memcpy(&result, &largest, sizeof result);
    return result;
}

/* e^x for x <= 88, to a unit in the last place: 2^n · p(x − n·ln 2). Exactly 1 at 0, and 0 below −87. */
INLINE vf power(vf x) {
    vi n = to_int(mul(x, all(1.44269504088896341f)));
    vf whole = to_float(n), r = fma_(whole, all(-0.693359375f), x), y = all(1.9875691500e-4f);
    r = fma_(whole, all(2.12194440e-4f), r);
    y = fma_(y, r, all(1.3981999507e-3f));
    y = fma_(y, r, all(8.3334519073e-3f));
    y = fma_(y, r, all(4.1665795894e-2f));
    y = fma_(y, r, all(1.6666665459e-1f));
    y = fma_(y, r, all(5.0000001201e-1f));
    y = add(fma_(y, mul(r, r), r), all(1.0f));
    return where_at_least(x, all(-87.0f), mul(y, exponent(add_int(n, all_int(127)))));
}

INLINE vf silu(vf g) { return divide(g, add(all(1.0f), power(smaller(sub(all(0.0f), g), all(88.0f))))); }

/* g/2 · (1 + tanh(u)) = g · (1 − 1 / (1 + e^2u)), u = √(2/π) · (g + 0.044715·g³). */
INLINE vf gelu(vf g) {
    vf u = mul(mul(g, fma_(mul(g, g), all(0.044715f), all(1.0f))), all(2.0f * 0.79788456080286536f));
    return sub(g, divide(g, add(all(1.0f), power(smaller(u, all(88.0f))))));
}

/* y = x / sqrt(mean(x²) + eps) · w. */
static void rms_norm(const float *x, const float *w, float eps, int n, float *y) {
    vf squares = all(0.0f);
    for (int i = 0; i < n; i += WIDTH) squares = fma_(load(x + i), load(x + i), squares);
    vf scale = all(1.0f / sqrtf(sum_of(squares) / (float)n + eps));
    for (int i = 0; i < n; i += WIDTH) store(y + i, mul(mul(load(x + i), scale), load(w + i)));
}
