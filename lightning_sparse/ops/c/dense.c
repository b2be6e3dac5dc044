// What is formed of a whole gradient, and what of a vector reaches a bound: the CPU formulations of ops/host.py for
// float32, without Python. They are called through ctypes, which releases the GIL meanwhile. Results equal those in
// Python bit for bit. Built by library.py, once for each set of instructions: plain C that compilers turn
// into vectors.
#include "common.h"

#define BLOCK 2048     // and in the first-level cache
#define FAR 1024       // elements to ask for ahead in a row

// Bits of what magnitudes are compared with: all reach a negative bound, none reaches one that is not a number.
INLINE uint32_t level_of(float bound) { return bound >= 0 ? bits_of(bound) & MAGNITUDE : bound < 0 ? 0 : MAGNITUDE; }

// A bit for each of 64 flags.
INLINE uint64_t bits_where(const uint8_t *flags) {
  uint64_t hits = 0, eight;
  for (int j = 0; j < STRIP; j += 8) {
    memcpy(&eight, flags + j, 8);
    hits |= eight * 0x0102040810204080ull >> 56 << j;
  }
  return hits;
}

// Which of 64 numbers have magnitudes whose bits reach a level. Not a number reaches nothing.
INLINE uint64_t reach(const float *x, uint32_t level) {
  uint8_t flags[STRIP];
  for (int j = 0; j < STRIP; j++) {
    uint32_t m = bits_of(x[j]) & MAGNITUDE;
    flags[j] = (m >= level) & (m <= INFINITE);
  }
  return bits_where(flags);
}

// x[i] += y[i], but where that is not finite; *finite becomes 0 then, and what reaches the level is of no use.
// What compilers make of the loop below takes a third longer with AVX2.
#ifdef __AVX2__
INLINE uint64_t add(float *x, const float *y, uint32_t level, int32_t *finite) {
  const __m256i least = _mm256_set1_epi32((int)level - 1), infinite = _mm256_set1_epi32((int)INFINITE);
  __m256i all = _mm256_set1_epi32(-1);
  uint64_t hits = 0;
  for (int j = 0; j < STRIP; j += 8) {
    __m256 before = _mm256_loadu_ps(x + j), sum = _mm256_add_ps(before, _mm256_loadu_ps(y + j));
    __m256i m = _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32((int)MAGNITUDE));
    __m256i number = _mm256_cmpgt_epi32(infinite, m), above = _mm256_and_si256(_mm256_cmpgt_epi32(m, least), number);
    _mm256_storeu_ps(x + j, _mm256_blendv_ps(before, sum, _mm256_castsi256_ps(number)));
    hits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(above)) << j;
    all = _mm256_and_si256(all, number);
  }
  *finite &= _mm256_movemask_epi8(all) == -1;
  return hits;
}
#else
INLINE uint64_t add(float *x, const float *y, uint32_t level, int32_t *finite) {
  uint8_t flags[STRIP];
  uint32_t largest = 0;
  for (int j = 0; j < STRIP; j++) {
    uint32_t sum = bits_of(x[j] + y[j]), m = sum & MAGNITUDE;
    largest = m > largest ? m : largest, flags[j] = m >= level;
    x[j] = float_of(m < INFINITE ? sum : bits_of(x[j]));
  }
  *finite &= largest < INFINITE;
  return bits_where(flags);
}
#endif

// Places and magnitudes of what has a bit of at least one, with room for 15 more.
INLINE void extract(const float *x, uint64_t hits, int32_t first, int32_t *indices, float *magnitudes) {
  uint64_t rest = hits & (hits - 1);
  int j = __builtin_ctzll(hits), next = __builtin_ctzll(rest | 1ull << 63);
  // As a rule there are few: the first two without a branch that nobody can predict.
  indices[0] = first + j, indices[1] = first + next;
  magnitudes[0] = fabsf(x[j]), magnitudes[1] = fabsf(x[next]);
  rest &= rest - 1;
  for (int64_t i = 2; rest; rest &= rest - 1, i++) {
    j = __builtin_ctzll(rest);
    indices[i] = first + j, magnitudes[i] = fabsf(x[j]);
  }
}

// What has a bit of at least one, behind what was found before; only counted where there is no room.
INLINE int64_t collect(const float *x, uint64_t hits, int64_t first, int32_t *indices, float *magnitudes, int64_t found,
                       int64_t room) {
  int64_t end = found + __builtin_popcountll(hits);
  if (end <= room) extract(x, hits, (int32_t)first, indices + found, magnitudes + found);
  return end;
}

// Of which strips of a block something has a bit. They are gone through at its end, because nobody can predict which
// ones they are: a branch for each strip would keep the processor from working ahead.
typedef struct {
  uint64_t hits[BLOCK / STRIP + 1];
  int64_t at[BLOCK / STRIP + 1], count;
} marked;

INLINE void mark(marked *m, int64_t at, uint64_t hits) {
  m->at[m->count] = at, m->hits[m->count] = hits, m->count += hits != 0;
}

INLINE int64_t collect_marked(const float *x, marked *m, int64_t first, int32_t *indices, float *magnitudes,
                              int64_t found, int64_t room) {
  for (int64_t i = 0; i < m->count; i++)
    found = collect(x + m->at[i], m->hits[i], first + m->at[i], indices, magnitudes, found, room);
  m->count = 0;
  return found;
}

INLINE void clear_strip(void *grad, int kind) {
  if (kind)  // of lengths that the compiler knows
    memset(grad, 0, 2 * STRIP);
  else
    memset(grad, 0, 4 * STRIP);
}

typedef struct {
  float keep, add;        // of the second moment and of a squared gradient
  float least, damping;   // what roots have added, and what magnitudes are multiplied by
} weights;

// Of 64 coordinates: acc and the second moment, but where acc would not be finite, and the score; see ops/host.py.
// Whether all was finite.
INLINE int32_t weigh_strip(float *restrict acc, const float *restrict grad, float *restrict second,
                           float *restrict score, const weights by) {
  uint32_t largest = 0;
  const float most = float_of(INFINITE - 1);
  for (int j = 0; j < STRIP; j++) {
    float g = grad[j], a = acc[j] + g, v = second[j] * by.keep + by.add * g * g;
    v = v > most ? most : v;
    float waited = a * by.damping, within = v + waited * waited;
    within = within > most ? most : within;
    uint32_t m = bits_of(a) & MAGNITUDE;
    largest = m > largest ? m : largest;
    acc[j] = m < INFINITE ? a : acc[j], second[j] = m < INFINITE ? v : second[j];
    score[j] = a / sqrtf(sqrtf(within) + by.least);
  }
  return largest < INFINITE;
}

// Form 64 coordinates, with a second moment also of their scores, and find which reach a level.
INLINE uint64_t form_strip(float *acc, const float *grad, float *second, float *score, const weights *by,
                           uint32_t level, int32_t *finite) {
  if (!second) return add(acc, grad, level, finite);
  *finite &= weigh_strip(acc, grad, second, score, *by);
  return reach(score, level);
}

// A run of a gradient; what is found comes behind what was found before. Its score may take its place.
INLINE int64_t form(float *acc, float *second, float *score, void *grad, int kind, int clear, int64_t n,
                    const weights *by, float bound, int64_t first, int32_t *indices, float *magnitudes, int64_t found,
                    int64_t room, int32_t *finite) {
  float wide[STRIP], in[3][STRIP], out[STRIP];
  uint32_t level = level_of(bound);
  int64_t item = kind ? 2 : 4;
  char *g = grad;
  marked m = {.count = 0};
  for (int64_t start = 0; start < n; start += BLOCK) {
    int64_t size = n - start < BLOCK ? n - start : BLOCK, at = start, rest = size % STRIP;
    for (; at < start + size - rest; at += STRIP) {
      const float *given = widened(grad, kind, at, STRIP, wide);
      mark(&m, at, form_strip(acc + at, given, second ? second + at : NULL, out, by, level, finite));
      if (clear) clear_strip(g + item * at, kind);
      if (second) memcpy(score + at, out, 4 * STRIP);
    }
    found = collect_marked(second ? score : acc, &m, first, indices, magnitudes, found, room);
    if (rest) {
      size_t bytes = 4 * (size_t)rest;
      memset(in, 0, sizeof in);
      memcpy(in[0], widened(grad, kind, at, rest, wide), bytes), memcpy(in[1], acc + at, bytes);
      if (second) memcpy(in[2], second + at, bytes);
      uint64_t hits = form_strip(in[1], in[0], second ? in[2] : NULL, out, by, level, finite);
      mark(&m, 0, hits & ((1ull << rest) - 1));
      memcpy(acc + at, in[1], bytes);
      if (clear) memset(g + item * at, 0, (size_t)(item * rest));
      if (second) memcpy(second + at, in[2], bytes), memcpy(score + at, out, bytes);
      found = collect_marked(second ? out : in[1], &m, first + at, indices, magnitudes, found, room);
    }
  }
  return found;
}

// What of a vector reaches a bound.
EXPORT int64_t ls_above(const float *x, int64_t n, float bound, int32_t *indices, float *magnitudes, int64_t room) {
  float left[STRIP] = {0};
  uint64_t hits;
  uint32_t level = level_of(bound);
  int64_t found = 0, whole = n / STRIP * STRIP;
  for (int64_t at = 0; at < whole; at += STRIP) {
    for (int64_t j = 0; j < STRIP; j += 16) __builtin_prefetch(x + at + FAR + j);
    hits = reach(x + at, level);
    if (hits) found = collect(x + at, hits, at, indices, magnitudes, found, room);
  }
  if (n == whole) return found;
  memcpy(left, x + whole, 4 * (size_t)(n - whole));
  hits = reach(left, level) & ((1ull << (n - whole)) - 1);
  return hits ? collect(left, hits, whole, indices, magnitudes, found, room) : found;
}

INLINE int64_t form_runs(float *acc, float *second, float *score, void *const *runs, const int64_t *ends, int64_t count,
                         int kind, int clear, const weights *by, float bound, int32_t *indices, float *magnitudes,
                         int64_t room, int32_t *finite) {
  int64_t found = 0, at = 0;
  *finite = 1;
  for (int64_t run = 0; run < count; at = ends[run++])
    found = form(acc + at, second ? second + at : NULL, score ? score + at : runs[run], runs[run], kind, clear,
                 ends[run] - at, by, bound, at, indices, magnitudes, found, room, finite);
  return found;
}

// The gradient lies in runs, of which each ends at a coordinate. Without a second moment, there is no score; where
// there is no place for it, it takes that of the gradient, of float32.
EXPORT int64_t ls_form(float *acc, float *second, float *score, void *const *runs, const int64_t *ends, int64_t count,
                       int kind, int clear, const weights *by, float bound, int32_t *indices, float *magnitudes,
                       int64_t room, int32_t *finite) {
  if (!second)
    return form_runs(acc, NULL, NULL, runs, ends, count, kind, 1, by, bound, indices, magnitudes, room, finite);
  return form_runs(acc, second, score, runs, ends, count, kind, clear, by, bound, indices, magnitudes, room, finite);
}

// How far 64 weights have drifted from those that ranks agree on, and with gradients the product with these.
INLINE uint64_t part_strip(float *restrict away, float *restrict score, const float *restrict agreed,
                           const float *restrict own, const float *restrict pushed, uint32_t level, int32_t *finite) {
  uint32_t largest = 0;
  for (int j = 0; j < STRIP; j++) {
    float drift = agreed[j] - own[j];
    uint32_t m = bits_of(drift) & MAGNITUDE;
    largest = m > largest ? m : largest;
    away[j] = drift;
    if (pushed) score[j] = drift * pushed[j];
  }
  *finite &= largest < INFINITE;
  return reach(pushed ? score : away, level);
}

INLINE int64_t part(float *away, float *score, const float *agreed, const void *own, int kind, const float *pushed,
                    int64_t n, float bound, int64_t first, int32_t *indices, float *magnitudes, int64_t found,
                    int64_t room, int32_t *finite) {
  float wide[STRIP], in[3][STRIP], out[2][STRIP];
  uint32_t level = level_of(bound);
  marked m = {.count = 0};
  for (int64_t start = 0; start < n; start += BLOCK) {
    int64_t size = n - start < BLOCK ? n - start : BLOCK, at = start, rest = size % STRIP;
    for (; at < start + size - rest; at += STRIP)
      mark(&m, at, part_strip(away + at, pushed ? score + at : NULL, agreed + at, widened(own, kind, at, STRIP, wide),
                              pushed ? pushed + at : NULL, level, finite));
    found = collect_marked(pushed ? score : away, &m, first, indices, magnitudes, found, room);
    if (rest) {
      size_t bytes = 4 * (size_t)rest;
      memset(in, 0, sizeof in);
      memcpy(in[0], widened(own, kind, at, rest, wide), bytes), memcpy(in[1], agreed + at, bytes);
      if (pushed) memcpy(in[2], pushed + at, bytes);
      uint64_t hits = part_strip(out[0], out[1], in[1], in[0], pushed ? in[2] : NULL, level, finite);
      mark(&m, 0, hits & ((1ull << rest) - 1));
      memcpy(away + at, out[0], bytes);
      if (pushed) memcpy(score + at, out[1], bytes);
      found = collect_marked(pushed ? out[1] : out[0], &m, first + at, indices, magnitudes, found, room);
    }
  }
  return found;
}

// A rank's weights lie in runs, of which each ends at a coordinate. Without gradients there is no score.
EXPORT int64_t ls_part(float *away, float *score, const float *agreed, const float *pushed, void *const *runs,
                       const int64_t *ends, int64_t count, int kind, float bound, int32_t *indices, float *magnitudes,
                       int64_t room, int32_t *finite) {
  int64_t found = 0, at = 0;
  *finite = 1;
  for (int64_t run = 0; run < count; at = ends[run++])
    found = part(away + at, pushed ? score + at : NULL, agreed + at, runs[run], kind, pushed ? pushed + at : NULL,
                 ends[run] - at, bound, at, indices, magnitudes, found, room, finite);
  return found;
}
