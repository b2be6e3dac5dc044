// Sums and extremes of a vector: the CPU formulations of host_sums.py for float32, equal bit for bit. Each function exists
// once, as inline code, and is compiled as in dense.c.
#include "common.h"

#define CHUNK 65536  // as in host_arrays.py
#define LANES 1024   // as in host_sums.py

// Sums: lanes of a chunk from its first row on, chunk by chunk, and the lanes at the end.
INLINE double folded(double *lanes) {
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

#define SUM(n, value, square, hit, each_chunk)                                      \
  double total[LANES], squares[LANES], hits[LANES], part[LANES], second[LANES];     \
  memset(total, 0, sizeof total), memset(squares, 0, sizeof squares);               \
  memset(hits, 0, sizeof hits);                                                     \
  for (int64_t chunk = 0; chunk < n; chunk += CHUNK) {                              \
    int64_t size = n - chunk < CHUNK ? n - chunk : CHUNK, whole = size / LANES;     \
    int64_t row = 0;                                                                \
    each_chunk(x + chunk, size);                                                    \
    memset(part, 0, sizeof part), memset(second, 0, sizeof second);                 \
    for (; row + ROWS <= whole; row += ROWS) ADD_ROWS(value, square, hit, ROWS)     \
    for (; row < whole; row++) ADD_ROWS(value, square, hit, 1)                      \
    for (int64_t j = 0; whole && j < LANES; j++) {                                  \
      total[j] += part[j];                                                          \
      if (square) squares[j] += second[j];                                          \
    }                                                                               \
    for (int64_t j = 0; j < size % LANES; j++) {                                    \
      double z = value(x[chunk + whole * LANES + j]);                               \
      total[j] += z;                                                                \
      if (square) squares[j] += z * z;                                              \
      hits[j] += hit(x[chunk + whole * LANES + j]);                                 \
    }                                                                               \
  }

#define ROWS 8  // that are added up in registers
#define ADD_ROWS(value, square, hit, rows)                                          \
  for (int64_t j = 0; j < LANES; j++) {                                             \
    const float *column = x + chunk + row * LANES + j;                              \
    double sum = part[j], sum_of_squares = second[j], reached = hits[j];            \
    for (int i = 0; i < rows; i++) {                                                \
      double z = value(column[i * LANES]);                                          \
      sum += z;                                                                     \
      if (square) sum_of_squares += z * z;                                          \
      reached += hit(column[i * LANES]);                                            \
    }                                                                               \
    part[j] = sum, hits[j] = reached;                                               \
    if (square) second[j] = sum_of_squares;                                         \
  }
#define NO_HIT(x) 0.0
#define NOTHING(x, n)

INLINE uint32_t largest_of(const float *x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t m = bits_of(x[i]) & MAGNITUDE;
    largest = m > largest ? m : largest;
  }
  return largest;
}

INLINE void excess(const float *x, int64_t n, double level, float bound, double *out) {
  const double least = bound;
#define REACHES(x) ((double)fabsf(x) >= least ? 1.0 : 0.0)
#define BEYOND(x) ((double)fabsf(x) - level > 0.0 ? (double)fabsf(x) - level : 0.0)
  SUM(n, BEYOND, 1, REACHES, NOTHING)
  out[0] = folded(hits), out[1] = folded(total), out[2] = folded(squares);
}

INLINE void moments(const float *x, int64_t n, double *out) {
#define ITSELF(x) ((double)(x))
  SUM(n, ITSELF, 1, NO_HIT, NOTHING)
  out[0] = folded(total), out[1] = folded(squares);
}

INLINE void sum_and_maximum(const float *x, int64_t n, double *out) {
  uint32_t largest = 0, found;
#define MAXIMUM(x, n) found = largest_of(x, n), largest = found > largest ? found : largest
#define WITHOUT_SIGN(x) ((double)fabsf(x))
  SUM(n, WITHOUT_SIGN, 0, NO_HIT, MAXIMUM)
  out[0] = folded(total), out[1] = (double)float_of(largest);
}

#define VARIANTS(name, target)                                                                                      \
  target static int32_t all_finite_##name(const float *x, int64_t n) { return largest_of(x, n) < INFINITE; }        \
  target static void excess_##name(const float *x, int64_t n, double level, float bound, double *out) {             \
    excess(x, n, level, bound, out);                                                                                \
  }                                                                                                                 \
  target static void moments_##name(const float *x, int64_t n, double *out) { moments(x, n, out); }                 \
  target static void sum_and_maximum_##name(const float *x, int64_t n, double *out) { sum_and_maximum(x, n, out); }

VARIANTS(portable, )
#ifdef STREAMS
VARIANTS(avx2, AVX2)
VARIANTS(avx512, AVX512)
#endif

EXPORT int32_t ls_all_finite(const float *x, int64_t n) { return PICK(all_finite)(x, n); }
EXPORT void ls_excess(const float *x, int64_t n, double over, float bound, double *out) {
  PICK(excess)(x, n, over, bound, out);
}
EXPORT void ls_moments(const float *x, int64_t n, double *out) { PICK(moments)(x, n, out); }
EXPORT void ls_sum_and_maximum(const float *x, int64_t n, double *out) { PICK(sum_and_maximum)(x, n, out); }
