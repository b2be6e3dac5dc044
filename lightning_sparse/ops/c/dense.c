// What is formed of a whole gradient, and what of a vector reaches a bound: the CPU formulations of host_dense.py and
// host_reach.py for float32, without Python. They are called through ctypes, which releases the GIL meanwhile. Results
// equal those in Python bit for bit. Built by library.py.
//
// Each function exists once, as inline code, and is compiled for the instruction sets that this processor may have.
#include "lanes.h"

#define STRIP 64       // elements that are worked on in registers
#define BLOCK 2048     // and in the first-level cache
#define STREAM (1 << 20)  // from so many elements on, what is written goes past the caches
#define FAR 1024       // elements to ask for ahead in a row

// Bits of what magnitudes are compared with: all reach a negative bound, none reaches one that is not a number.
INLINE uint32_t level_of(float bound) { return bound >= 0 ? bits_of(bound) & MAGNITUDE : bound < 0 ? 0 : MAGNITUDE; }

INLINE float from_half(uint16_t h) {
  uint32_t b = (uint32_t)(h & 0x7fff) << 13, exponent = b & 0x0f800000;
  uint32_t finite = b + (112u << 23), other = b + (224u << 23);
  float subnormal = float_of(b + (113u << 23)) - float_of(113u << 23);
  uint32_t found = exponent == 0x0f800000 ? other : exponent ? finite : bits_of(subnormal);
  return float_of(found | (uint32_t)(h & 0x8000) << 16);
}

// What of 64 numbers is done at once: their magnitudes' bits are compared with a level, which gives a bit each. Not a
// number reaches nothing.
typedef struct {
  // sum[i] = x[i] + y[i], to acc, too, if it is not NULL; top holds the largest bits of magnitudes so far, in 16 parts.
  uint64_t (*add)(const float *x, const float *y, float *acc, float *sum, uint32_t level, uint32_t *top, int stream);
  uint64_t (*reach)(const float *x, uint32_t level);
  // Places and magnitudes of what has a bit of at least one, with room for 15 more.
  void (*extract)(const float *x, uint64_t hits, int32_t first, int32_t *indices, float *magnitudes);
  // Past the caches, where less than a line is written at once: other writes in between would tear lines.
  void (*stream)(float *y, const float *x, int64_t n);
} strip;

INLINE uint64_t reach_portable(const float *x, uint32_t level) {
  uint32_t any = 0;
  uint64_t hits = 0;
  for (int j = 0; j < STRIP; j++) any |= (uint32_t)((bits_of(x[j]) & MAGNITUDE) >= level);
  for (int j = 0; any && j < STRIP; j++) {
    uint32_t m = bits_of(x[j]) & MAGNITUDE;
    hits |= (uint64_t)(m >= level && m <= INFINITE) << j;
  }
  return hits;
}

INLINE uint64_t add_portable(const float *x, const float *y, float *acc, float *sum, uint32_t level, uint32_t *top,
                             int stream) {
  (void)stream;
  for (int j = 0; j < STRIP; j++) {
    sum[j] = x[j] + y[j];
    uint32_t m = bits_of(sum[j]) & MAGNITUDE;
    top[j % 16] = m > top[j % 16] ? m : top[j % 16];
  }
  if (acc) memcpy(acc, sum, 4 * STRIP);
  return reach_portable(sum, level);
}

INLINE void extract_portable(const float *x, uint64_t hits, int32_t first, int32_t *indices, float *magnitudes) {
  uint64_t rest = hits & (hits - 1);
  int j = __builtin_ctzll(hits), next = __builtin_ctzll(rest | 1ull << 63);
  // As a rule there are few: the first two without a branch that nobody can predict.
  if (indices) indices[0] = first + j, indices[1] = first + next;
  magnitudes[0] = fabsf(x[j]), magnitudes[1] = fabsf(x[next]);
  rest &= rest - 1;
  for (int64_t i = 2; rest; rest &= rest - 1, i++) {
    j = __builtin_ctzll(rest);
    if (indices) indices[i] = first + j;
    magnitudes[i] = fabsf(x[j]);
  }
}
static const strip PORTABLE = {add_portable, reach_portable, extract_portable, NULL};

#ifdef STREAMS
AVX2 INLINE uint64_t hits_avx2(__m256i m, uint32_t level) {
  __m256i above = _mm256_cmpgt_epi32(m, _mm256_set1_epi32((int)level - 1));
  __m256i number = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)INFINITE + 1), m);
  return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_and_si256(above, number)));
}

AVX2 INLINE uint64_t add_avx2(const float *x, const float *y, float *acc, float *sum, uint32_t level, uint32_t *top,
                              int stream) {
  (void)stream;
  __m256i largest = _mm256_loadu_si256((__m256i *)top);
  uint64_t hits = 0;
  for (int j = 0; j < STRIP; j += 8) {
    __m256 a = _mm256_add_ps(_mm256_loadu_ps(x + j), _mm256_loadu_ps(y + j));
    __m256i m = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32((int)MAGNITUDE));
    largest = _mm256_max_epu32(largest, m);
    _mm256_storeu_ps(sum + j, a);
    if (acc) _mm256_storeu_ps(acc + j, a);
    hits |= hits_avx2(m, level) << j;
  }
  _mm256_storeu_si256((__m256i *)top, largest);
  return hits;
}

AVX2 INLINE uint64_t reach_avx2(const float *x, uint32_t level) {
  uint64_t hits = 0;
  for (int j = 0; j < STRIP; j += 8) {
    __m256i m = _mm256_loadu_si256((const __m256i *)(x + j));
    hits |= hits_avx2(_mm256_and_si256(m, _mm256_set1_epi32((int)MAGNITUDE)), level) << j;
  }
  return hits;
}
AVX2 INLINE void stream_avx2(float *y, const float *x, int64_t n) {
  for (int64_t j = 0; j < n; j += 8) _mm256_stream_ps(y + j, _mm256_loadu_ps(x + j));
}
static const strip OF_AVX2 = {add_avx2, reach_avx2, extract_portable, stream_avx2};

AVX512 INLINE uint64_t hits_avx512(__m512i m, uint32_t level) {
  __mmask16 above = _mm512_cmpge_epu32_mask(m, _mm512_set1_epi32((int)level));
  return _mm512_mask_cmple_epu32_mask(above, m, _mm512_set1_epi32((int)INFINITE));
}

AVX512 INLINE uint64_t add_avx512(const float *x, const float *y, float *acc, float *sum, uint32_t level, uint32_t *top,
                                  int stream) {
  __m512i largest = _mm512_loadu_si512(top);
  uint64_t hits = 0;
  for (int j = 0; j < STRIP; j += 16) {
    __m512 a = _mm512_add_ps(_mm512_loadu_ps(x + j), _mm512_loadu_ps(y + j));
    __m512i m = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)MAGNITUDE));
    largest = _mm512_max_epu32(largest, m);
    _mm512_storeu_ps(sum + j, a);
    if (stream)
      _mm512_stream_ps(acc + j, a);
    else
      _mm512_storeu_ps(acc + j, a);
    hits |= hits_avx512(m, level) << j;
  }
  _mm512_storeu_si512(top, largest);
  return hits;
}

AVX512 INLINE uint64_t reach_avx512(const float *x, uint32_t level) {
  uint64_t hits = 0;
  for (int j = 0; j < STRIP; j += 16) {
    __m512i m = _mm512_loadu_si512(x + j);
    hits |= hits_avx512(_mm512_and_si512(m, _mm512_set1_epi32((int)MAGNITUDE)), level) << j;
  }
  return hits;
}

AVX512 INLINE void extract_avx512(const float *x, uint64_t hits, int32_t first, int32_t *indices, float *magnitudes) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t found = 0;
  for (int j = 0; j < STRIP; j += 16) {
    __mmask16 some = (__mmask16)(hits >> j);
    __m512i m = _mm512_and_si512(_mm512_loadu_si512(x + j), _mm512_set1_epi32((int)MAGNITUDE));
    __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(first + j));
    if (indices) _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(some, places));
    _mm512_storeu_si512(magnitudes + found, _mm512_maskz_compress_epi32(some, m));
    found += __builtin_popcount(some);
  }
}
static const strip OF_AVX512 = {add_avx512, reach_avx512, extract_avx512, NULL};
#endif

// What has a bit of at least one, behind what was found before; only counted where there is no room.
INLINE int64_t collect(const float *x, uint64_t hits, int64_t first, int32_t *indices, float *magnitudes, int64_t found,
                       int64_t room, const strip s) {
  int64_t end = found + __builtin_popcountll(hits);
  if (end <= room) s.extract(x, hits, (int32_t)first, indices ? indices + found : indices, magnitudes + found);
  return end;
}

// 64 elements of a gradient as float32, where they lie or widened.
INLINE const float *widened(const void *grad, int kind, int64_t at, int64_t n, float *wide) {
  const uint16_t *g = (const uint16_t *)grad + at;
  if (kind == 0) return (const float *)grad + at;
  for (int64_t j = 0; j < n; j++) wide[j] = kind == 1 ? float_of((uint32_t)g[j] << 16) : from_half(g[j]);
  return wide;
}

// A run of a gradient; what is found comes behind what was found before.
INLINE int64_t accumulate(float *acc, const float *residual, void *grad, int kind, int64_t n, float bound,
                          int64_t first, int32_t *indices, float *magnitudes, int64_t found, int64_t room,
                          int stream, int32_t *finite, lanes *sums, const strip s) {
  float sum[BLOCK], wide[STRIP], left[2][STRIP];
  uint64_t hits;
  uint32_t top[16] = {0}, level = level_of(bound), largest = 0;
  const int late = stream && s.stream;  // whether a block is written at its end
  int64_t item = kind ? 2 : 4, ahead = (int64_t)(-(uintptr_t)acc % 64 / 4);  // up to where writing past caches begins
  char *g = grad;
  for (int64_t start = 0, size; start < n; start += size) {
    size = !start && stream && ahead ? ahead : BLOCK;
    if (size > n - start) size = n - start;
    for (int64_t at = start; at < start + size; at += STRIP) {
      int64_t whole = start + size - at;
      float *here = sum + (late || sums->kind ? at - start : 0);  // otherwise one strip is enough
      if (whole >= STRIP) {
        for (int64_t j = 0; j < STRIP && !sums->kind; j += 16) __builtin_prefetch(residual + at + FAR + j);
        for (int64_t j = 0; j < STRIP * item; j += 64) __builtin_prefetch(g + item * (at + FAR) + j);
        const float *y = widened(grad, kind, at, STRIP, wide);
        hits = s.add(residual + at, y, late ? NULL : acc + at, here, level, top, stream);
        if (!late && kind)  // of lengths that the compiler knows
          memset(g + item * at, 0, 2 * STRIP);
        else if (!late)
          memset(g + item * at, 0, 4 * STRIP);
      } else {
        memset(left, 0, sizeof left);
        memcpy(left[0], residual + at, 4 * (size_t)whole);
        memcpy(left[1], widened(grad, kind, at, whole, wide), 4 * (size_t)whole);
        hits = s.add(left[0], left[1], left[0], here, level, top, 0) & ((1ull << whole) - 1);
        memcpy(acc + at, left[0], 4 * (size_t)whole);
        memset(g + item * at, 0, (size_t)(item * whole));
      }
      if (hits) found = collect(here, hits, first + at, indices, magnitudes, found, room, s);
    }
    if (late) s.stream(acc + start, sum, size / STRIP * STRIP);
    if (late) memset(g + item * start, 0, (size_t)(item * (size / STRIP * STRIP)));
    if (sums->kind) add_to(sums, first + start, sum, residual + start + FAR, size);
  }
  for (int j = 0; j < 16; j++) largest = top[j] > largest ? top[j] : largest;
  *finite &= largest < INFINITE;
#ifdef STREAMS
  _mm_sfence();
#endif
  return found;
}

typedef struct {
  float keep, add;        // of the second moment and of a squared gradient
  float least, damping;   // what roots have added, and what magnitudes are multiplied by
} weights;

// Of 64 coordinates: acc, the next second moment, and the score; see host_dense.py.
INLINE uint32_t weigh_strip(const float *restrict residual, const float *restrict grad, const float *restrict now,
                            float *restrict acc, float *restrict second, float *restrict score, const weights by) {
  uint32_t largest = 0;
  const float most = float_of(INFINITE - 1);
  for (int j = 0; j < STRIP; j++) {
    float g = grad[j], a = residual[j] + g, v = now[j] * by.keep + by.add * g * g;
    v = v > most ? most : v;
    float waited = a * by.damping, within = v + waited * waited;
    within = within > most ? most : within;
    uint32_t m = bits_of(a) & MAGNITUDE;
    largest = m > largest ? m : largest;
    acc[j] = a, second[j] = v, score[j] = a / sqrtf(sqrtf(within) + by.least);
  }
  return largest;
}

// A run of a gradient; what is found comes behind what was found before. The score may take the gradient's place.
INLINE int64_t weigh(const float *residual, void *grad, int kind, const float *now, float *acc, float *second,
                     float *score, int clear, int64_t n, const weights by, float bound, int64_t first, int32_t *indices,
                     float *magnitudes, int64_t found, int64_t room, int32_t *finite, lanes *sums, const strip s) {
  float x[BLOCK], wide[STRIP], in[3][STRIP], out[2][STRIP];
  uint64_t hits;
  uint32_t level = level_of(bound), largest = 0, top;
  int64_t item = kind ? 2 : 4;
  for (int64_t start = 0; start < n; start += BLOCK) {
    int64_t size = n - start < BLOCK ? n - start : BLOCK;
    for (int64_t at = start; at < start + size; at += STRIP) {
      int64_t whole = n - at < STRIP ? n - at : STRIP;
      size_t bytes = 4 * (size_t)whole;
      float *here = x + (at - start);
      if (whole == STRIP) {
        for (int64_t j = 0; j < STRIP; j += 16) {
          __builtin_prefetch(residual + at + FAR + j), __builtin_prefetch(now + at + FAR + j);
          __builtin_prefetch((char *)grad + item * (at + FAR + j));
        }
        memcpy(in[0], widened(grad, kind, at, STRIP, wide), 4 * STRIP);
        top = weigh_strip(residual + at, in[0], now + at, out[0], out[1], here, by);
        hits = s.reach(here, level);
      } else {
        memset(in, 0, sizeof in);
        memcpy(in[0], widened(grad, kind, at, whole, wide), bytes);
        memcpy(in[1], residual + at, bytes), memcpy(in[2], now + at, bytes);
        top = weigh_strip(in[1], in[0], in[2], out[0], out[1], here, by);
        hits = s.reach(here, level) & ((1ull << whole) - 1);
      }
      largest = top > largest ? top : largest;
      memcpy(acc + at, out[0], bytes), memcpy(second + at, out[1], bytes);
      if (clear) memset((char *)grad + item * at, 0, (size_t)(item * whole));
      memcpy(score + at, here, bytes);
      if (hits) found = collect(here, hits, first + at, indices, magnitudes, found, room, s);
    }
    if (sums->kind) add_to(sums, first + start, x, residual + start + FAR, size);
  }
  *finite &= largest < INFINITE;
  return found;
}

INLINE int64_t above(const float *x, int64_t n, float bound, int32_t *indices, float *magnitudes, int64_t room,
                     const strip s) {
  float left[STRIP] = {0};
  uint64_t hits;
  uint32_t level = level_of(bound);
  int64_t found = 0, whole = n / STRIP * STRIP;
  for (int64_t at = 0; at < whole; at += STRIP) {
    for (int64_t j = 0; j < STRIP; j += 16) __builtin_prefetch(x + at + FAR + j);
    hits = s.reach(x + at, level);
    if (hits) found = collect(x + at, hits, at, indices, magnitudes, found, room, s);
  }
  if (n == whole) return found;
  memcpy(left, x + whole, 4 * (size_t)(n - whole));
  hits = s.reach(left, level) & ((1ull << (n - whole)) - 1);
  return hits ? collect(left, hits, whole, indices, magnitudes, found, room, s) : found;
}

#define VARIANTS(name, target, s)                                                                                   \
  target static int64_t accumulate_##name(float *acc, const float *residual, void *const *runs,                     \
                                          const int64_t *ends, int64_t count, int kind, float bound,                \
                                          int32_t *indices, float *magnitudes, int64_t room, int32_t *finite,       \
                                          int64_t summed, double *out) {                                            \
    int64_t found = 0, start = 0;                                                                                   \
    lanes sums;                                                                                                     \
    *finite = 1, sums.kind = 0;                                                                                     \
    if (summed) begin_sums(&sums, summed, ends[count - 1], 0, SMALLEST);                                            \
    for (int64_t run = 0; run < count; start = ends[run++])                                                         \
      found = accumulate(acc + start, residual + start, runs[run], kind, ends[run] - start, bound, start, indices,  \
                         magnitudes, found, room, ends[count - 1] >= STREAM, finite, &sums, s);                     \
    if (summed) end_sums(&sums, out);                                                                               \
    return found;                                                                                                   \
  }                                                                                                                 \
  target static int64_t weigh_##name(const float *residual, void *const *runs, const int64_t *ends, int64_t count,    \
                                     int kind, const float *now, float *acc, float *second, float *score, int clear, \
                                     const weights *by, float bound, int32_t *indices, float *magnitudes,            \
                                     int64_t room, int32_t *finite, int64_t summed, double *out) {                   \
    int64_t found = 0, at = 0;                                                                                      \
    lanes sums;                                                                                                     \
    *finite = 1, sums.kind = 0;                                                                                     \
    if (summed) begin_sums(&sums, summed, ends[count - 1], 0, SMALLEST);                                            \
    for (int64_t run = 0; run < count; at = ends[run++])                                                            \
      found = weigh(residual + at, runs[run], kind, now + at, acc + at, second + at, score + at, clear,             \
                    ends[run] - at, *by, bound, at, indices, magnitudes, found, room, finite, &sums, s);            \
    if (summed) end_sums(&sums, out);                                                                               \
    return found;                                                                                                   \
  }                                                                                                                 \
  target static int64_t above_##name(const float *x, int64_t n, float bound, int32_t *indices, float *magnitudes,  \
                                     int64_t room) {                                                                \
    return above(x, n, bound, indices, magnitudes, room, s);                                                        \
  }

VARIANTS(portable, , PORTABLE)
#ifdef STREAMS
VARIANTS(avx2, AVX2, OF_AVX2)
VARIANTS(avx512, AVX512, OF_AVX512)
#endif

// The gradient lies in runs, of which each ends at a coordinate. summed: what is summed up on the way, 0 for nothing;
// out: see end_sums.
EXPORT int64_t ls_accumulate(float *acc, const float *residual, void *const *runs, const int64_t *ends, int64_t count,
                             int kind, float bound, int32_t *indices, float *magnitudes, int64_t room,
                             int32_t *finite, int64_t summed, double *out) {
  return PICK(accumulate)(acc, residual, runs, ends, count, kind, bound, indices, magnitudes, room, finite, summed,
                          out);
}
EXPORT int64_t ls_weigh(const float *residual, void *const *runs, const int64_t *ends, int64_t count, int kind,
                        const float *now, float *acc, float *second, float *score, int clear, const weights *by,
                        float bound, int32_t *indices, float *magnitudes, int64_t room, int32_t *finite,
                        int64_t summed, double *out) {
  return PICK(weigh)(residual, runs, ends, count, kind, now, acc, second, score, clear, by, bound, indices, magnitudes,
                     room, finite, summed, out);
}
EXPORT int64_t ls_above(const float *x, int64_t n, float bound, int32_t *indices, float *magnitudes, int64_t room) {
  return PICK(above)(x, n, bound, indices, magnitudes, room);
}
