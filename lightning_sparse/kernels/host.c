// The CPU formulations of host.py for float32, without Python: called through ctypes, which releases the GIL meanwhile.
// Results equal those of host.py bit for bit. Built by library.py.
//
// Each function exists once, as inline code, and is compiled for the instruction sets that this processor may have.
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define STREAMS 1
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define BLOCK 2048     // elements that are worked on in the first-level cache
#define CHUNK 65536    // as in host.py
#define LANES 1024     // as in host.py
#define STREAM (1 << 20)  // from so many elements on, what is written goes past the caches
#define AHEAD 24       // elements to prefetch

static const uint32_t INFINITE = 0x7f800000, MAGNITUDE = 0x7fffffff;

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

// Bits of what magnitudes are compared with: all reach a negative bound, none reaches one that is not a number.
INLINE uint32_t level_of(float bound) { return bound >= 0 ? bits_of(bound) & MAGNITUDE : bound < 0 ? 0 : MAGNITUDE; }

INLINE float from_half(uint16_t h) {
  uint32_t b = (uint32_t)(h & 0x7fff) << 13, exponent = b & 0x0f800000;
  uint32_t finite = b + (112u << 23), other = b + (224u << 23);
  float subnormal = float_of(b + (113u << 23)) - float_of(113u << 23);
  uint32_t found = exponent == 0x0f800000 ? other : exponent ? finite : bits_of(subnormal);
  return float_of(found | (uint32_t)(h & 0x8000) << 16);
}

// Which of 32 magnitudes, given as bits, reach a bound: a bit each. Not a number reaches nothing.
typedef uint32_t hits_of(const uint32_t *m, uint32_t bound);

INLINE uint32_t hits_portable(const uint32_t *m, uint32_t bound) {
  uint32_t any = 0, hits = 0;
  for (int j = 0; j < 32; j++) any |= (uint32_t)(m[j] >= bound);
  for (int j = 0; any && j < 32; j++) hits |= (uint32_t)(m[j] >= bound && m[j] <= INFINITE) << j;
  return hits;
}

#ifdef STREAMS
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))

AVX2 INLINE uint32_t hits_avx2(const uint32_t *m, uint32_t bound) {
  const __m256i below = _mm256_set1_epi32((int)bound - 1), beyond = _mm256_set1_epi32((int)INFINITE + 1);
  uint32_t hits = 0;
  for (int j = 0; j < 4; j++) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(m + 8 * j));
    __m256i reached = _mm256_and_si256(_mm256_cmpgt_epi32(x, below), _mm256_cmpgt_epi32(beyond, x));
    hits |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(reached)) << (8 * j);
  }
  return hits;
}

AVX512 INLINE uint32_t hits_avx512(const uint32_t *m, uint32_t bound) {
  const __m512i level = _mm512_set1_epi32((int)bound), infinite = _mm512_set1_epi32((int)INFINITE);
  uint32_t hits = 0;
  for (int j = 0; j < 2; j++) {
    __m512i x = _mm512_loadu_si512(m + 16 * j);
    __mmask16 reached = _mm512_mask_cmple_epu32_mask(_mm512_cmpge_epu32_mask(x, level), x, infinite);
    hits |= (uint32_t)reached << (16 * j);
  }
  return hits;
}
#endif

// Coordinates and magnitudes of a block that reach a bound; the block may be read up to the next multiple of 32.
INLINE int64_t collect(uint32_t *m, int64_t n, uint32_t bound, int64_t first, int32_t *indices, float *magnitudes,
                       int64_t found, int64_t room, hits_of *hits_of) {
  for (int64_t i = n; i % 32; i++) m[i] = MAGNITUDE;  // not a number
  for (int64_t i = 0; i < n; i += 32)
    for (uint32_t hits = hits_of(m + i, bound); hits; hits &= hits - 1, found++) {
      if (found >= room) continue;
      int64_t j = i + __builtin_ctz(hits);
      if (indices) indices[found] = (int32_t)(first + j);
      magnitudes[found] = float_of(m[j]);
    }
  return found;
}

INLINE void write_block(float *to, const float *from, int64_t n, int stream) {
#ifdef STREAMS
  if (stream) {
    int64_t i = 0;
    for (; i < n && ((uintptr_t)(to + i) & 15); i++) to[i] = from[i];
    for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
    for (; i < n; i++) to[i] = from[i];
    return;
  }
#endif
  (void)stream;
  memcpy(to, from, 4 * (size_t)n);
}

INLINE int64_t accumulate(float *acc, const float *residual, void *grad, int kind, int64_t n, float bound,
                          int64_t first, int32_t *indices, float *magnitudes, int64_t room, int32_t *finite,
                          hits_of *hits_of) {
  float a[BLOCK];
  uint32_t m[BLOCK], largest = 0, level = level_of(bound);
  int64_t found = 0;
  for (int64_t start = 0; start < n; start += BLOCK) {
    int64_t size = n - start < BLOCK ? n - start : BLOCK;
    const float *r = residual + start;
    if (kind == 0) {
      float *g = (float *)grad + start;
      for (int64_t i = 0; i < size; i++) a[i] = r[i] + g[i];
      memset(g, 0, 4 * (size_t)size);
    } else {
      uint16_t *g = (uint16_t *)grad + start;
      if (kind == 1)
        for (int64_t i = 0; i < size; i++) a[i] = r[i] + float_of((uint32_t)g[i] << 16);
      else
        for (int64_t i = 0; i < size; i++) a[i] = r[i] + from_half(g[i]);
      memset(g, 0, 2 * (size_t)size);
    }
    for (int64_t i = 0; i < size; i++) {
      m[i] = bits_of(a[i]) & MAGNITUDE;
      largest = m[i] > largest ? m[i] : largest;
    }
    found = collect(m, size, level, first + start, indices, magnitudes, found, room, hits_of);
    write_block(acc + start, a, size, n >= STREAM);
  }
  *finite = largest < INFINITE;
#ifdef STREAMS
  _mm_sfence();
#endif
  return found;
}

// Of rows of a matrix, one after another; a vector has one row.
INLINE int64_t above(const float *x, int64_t rows, int64_t columns, int64_t stride, float bound, int64_t first,
                     int32_t *indices, float *magnitudes, int64_t room, hits_of *hits_of) {
  uint32_t m[BLOCK], level = level_of(bound);
  int64_t found = 0;
  for (int64_t row = 0; row < rows; row++, x += stride, first += columns)
    for (int64_t start = 0; start < columns; start += BLOCK) {
      int64_t size = columns - start < BLOCK ? columns - start : BLOCK;
      for (int64_t i = 0; i < size; i++) m[i] = bits_of(x[start + i]) & MAGNITUDE;
      found = collect(m, size, level, first + start, indices, magnitudes, found, room, hits_of);
    }
  return found;
}

// Sums: lanes of a chunk from its first row on, chunk by chunk, and the lanes at the end.
INLINE double folded(double *lanes) {
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

#define SUM(n, value, square, each_chunk)                                           \
  double total[LANES], squares[LANES], part[LANES], second[LANES];                  \
  memset(total, 0, sizeof total), memset(squares, 0, sizeof squares);               \
  for (int64_t chunk = 0; chunk < n; chunk += CHUNK) {                              \
    int64_t size = n - chunk < CHUNK ? n - chunk : CHUNK, whole = size / LANES;     \
    each_chunk(x + chunk, size);                                                    \
    for (int64_t row = 0; row < whole; row++)                                       \
      for (int64_t j = 0; j < LANES; j++) {                                         \
        double z = value(x[chunk + row * LANES + j]);                               \
        part[j] = row ? part[j] + z : z;                                            \
        if (square) second[j] = row ? second[j] + z * z : z * z;                    \
      }                                                                             \
    for (int64_t j = 0; whole && j < LANES; j++) {                                  \
      total[j] += part[j];                                                          \
      if (square) squares[j] += second[j];                                          \
    }                                                                               \
    for (int64_t j = 0; j < size % LANES; j++) {                                    \
      double z = value(x[chunk + whole * LANES + j]);                               \
      total[j] += z;                                                                \
      if (square) squares[j] += z * z;                                              \
    }                                                                               \
  }

INLINE uint32_t largest_of(const float *x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t m = bits_of(x[i]) & MAGNITUDE;
    largest = m > largest ? m : largest;
  }
  return largest;
}

INLINE int64_t reached_by(const float *x, int64_t n, float bound) {
  int32_t reached = 0;  // of a chunk
  for (int64_t i = 0; i < n; i++) reached += fabsf(x[i]) >= bound;
  return reached;
}

INLINE void excess(const float *x, int64_t n, double level, float bound, double *out) {
  int64_t count = 0;
#define COUNT(x, n) count += reached_by(x, n, bound)
#define BEYOND(x) ((double)fabsf(x) - level > 0.0 ? (double)fabsf(x) - level : 0.0)
  SUM(n, BEYOND, 1, COUNT)
  out[0] = (double)count, out[1] = folded(total), out[2] = folded(squares);
}

INLINE void moments(const float *x, int64_t n, double *out) {
#define NOTHING(x, n)
#define ITSELF(x) ((double)(x))
  SUM(n, ITSELF, 1, NOTHING)
  out[0] = folded(total), out[1] = folded(squares);
}

INLINE void sum_and_maximum(const float *x, int64_t n, double *out) {
  uint32_t largest = 0, found;
#define MAXIMUM(x, n) found = largest_of(x, n), largest = found > largest ? found : largest
#define WITHOUT_SIGN(x) ((double)fabsf(x))
  SUM(n, WITHOUT_SIGN, 0, MAXIMUM)
  out[0] = folded(total), out[1] = (double)float_of(largest);
}

// Memory, not the processor, decides how long these take: asked for ahead, it answers several at once.
// 0; or 1 where an index is not below the size of x, and the work is left undone there.
EXPORT int32_t ls_take(const float *x, int64_t size, const int64_t *indices, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(x + indices[i + AHEAD]);
    if ((uint64_t)indices[i] >= (uint64_t)size) return 1;
    out[i] = x[indices[i]];
  }
  return 0;
}

EXPORT int32_t ls_put(float *x, int64_t size, const int64_t *indices, int64_t n, const float *values) {
  for (int64_t i = 0; i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(x + indices[i + AHEAD], 1);
    if ((uint64_t)indices[i] >= (uint64_t)size) return 1;
    x[indices[i]] = values[i];
  }
  return 0;
}

#define VARIANTS(name, target)                                                                                     \
  target static int64_t accumulate_##name(float *acc, const float *residual, void *grad, int kind, int64_t n,      \
                                          float bound, int64_t first, int32_t *indices, float *magnitudes,         \
                                          int64_t room, int32_t *finite) {                                         \
    return accumulate(acc, residual, grad, kind, n, bound, first, indices, magnitudes, room, finite, hits_##name);            \
  }                                                                                                                \
  target static int64_t above_##name(const float *x, int64_t rows, int64_t columns, int64_t stride, float bound,   \
                                     int64_t first, int32_t *indices, float *magnitudes, int64_t room) {           \
    return above(x, rows, columns, stride, bound, first, indices, magnitudes, room, hits_##name);                  \
  }                                                                                                                \
  target static int32_t all_finite_##name(const float *x, int64_t n) { return largest_of(x, n) < INFINITE; }                  \
  target static void excess_##name(const float *x, int64_t n, double level, float bound, double *out) {            \
    excess(x, n, level, bound, out);                                                                               \
  }                                                                                                                \
  target static void moments_##name(const float *x, int64_t n, double *out) { moments(x, n, out); }                \
  target static void sum_and_maximum_##name(const float *x, int64_t n, double *out) { sum_and_maximum(x, n, out); }

VARIANTS(portable, )
#ifdef STREAMS
VARIANTS(avx2, AVX2)
VARIANTS(avx512, AVX512)
#define PICK(function) (level == 2 ? function##_avx512 : level == 1 ? function##_avx2 : function##_portable)
#else
#define PICK(function) function##_portable
#endif

static int level = -1;  // 0: portable, 1: AVX2, 2: AVX-512

// Choose instructions, at most those of a level; the level that is used. Called once, before anything else.
EXPORT int ls_choose(int most) {
  level = 0;
#ifdef STREAMS
  __builtin_cpu_init();
  if (most > 0 && __builtin_cpu_supports("avx2")) level = 1;
  if (most > 1 && level && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    level = 2;
#endif
  (void)most;
  return level;
}

EXPORT const char *ls_source(void) { return SOURCE; }

EXPORT int64_t ls_accumulate(float *acc, const float *residual, void *grad, int kind, int64_t n, float bound,
                             int64_t first, int32_t *indices, float *magnitudes, int64_t room, int32_t *finite) {
  return PICK(accumulate)(acc, residual, grad, kind, n, bound, first, indices, magnitudes, room, finite);
}
EXPORT int64_t ls_above(const float *x, int64_t rows, int64_t columns, int64_t stride, float bound, int64_t first,
                        int32_t *indices, float *magnitudes, int64_t room) {
  return PICK(above)(x, rows, columns, stride, bound, first, indices, magnitudes, room);
}
EXPORT int32_t ls_all_finite(const float *x, int64_t n) { return PICK(all_finite)(x, n); }
EXPORT void ls_excess(const float *x, int64_t n, double over, float bound, double *out) {
  PICK(excess)(x, n, over, bound, out);
}
EXPORT void ls_moments(const float *x, int64_t n, double *out) { PICK(moments)(x, n, out); }
EXPORT void ls_sum_and_maximum(const float *x, int64_t n, double *out) { PICK(sum_and_maximum)(x, n, out); }
