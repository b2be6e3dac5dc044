// Sums over the magnitudes of a vector, in an order that does not change: those of ops/reference.py for float32.
#include "common.h"

#define CHUNK 65536
#define LANES 256
#define SMALLEST 0x00800000u  // bits of the smallest normal number

// Part j is that of elements j, j + LANES, ...: those of a chunk, and then chunk by chunk.
typedef struct {
  double total[LANES], squares[LANES], product[LANES];
  int64_t number, exponent;
} lanes;

// The number from 1/2 on and below 1 of which x > 0 is a multiple by a power of two; the exponent is added to another.
INLINE double mantissa_of(double x, int64_t *exponent) {
  uint64_t b;
  memcpy(&b, &x, 8);
  *exponent += (int64_t)(b >> 52) - 1022;
  b = (b & 0xfffffffffffffull) | 0x3fe0000000000000ull;
  memcpy(&x, &b, 8);
  return x;
}

// Rows of at most a chunk. Counted are magnitudes from `least` on.
INLINE void add(lanes *s, const float *x, int64_t n, double level, uint32_t least, int logarithms) {
  double part[LANES] = {0}, squares[LANES] = {0}, product[LANES];
  uint32_t number = 0, exponent = 0;
  for (int j = 0; j < LANES; j++) product[j] = 1;
  for (int64_t at = 0; at < n; at += LANES) {
    int64_t size = n - at < LANES ? n - at : LANES;
    for (int64_t j = 0; j < size; j++) {
      float value = x[at + j];
      uint32_t m = bits_of(value) & MAGNITUDE, counted = (m >= least) & (m <= INFINITE);
      double over = fabsf(value) - level, z = over > 0 ? over : 0;
      part[j] += z, squares[j] += z * z, number += counted;
      if (logarithms) {
        exponent += counted ? m >> 23 : 0;
        product[j] *= float_of(counted ? (m & (SMALLEST - 1)) | 0x3f000000u : 0x3f800000u);
      }
    }
  }
  s->number += number, s->exponent += exponent;
  for (int j = 0; j < LANES; j++) {
    s->total[j] += part[j], s->squares[j] += squares[j];
    s->product[j] = mantissa_of(s->product[j] * product[j], &s->exponent);
  }
}

INLINE void add_all(lanes *s, const float *x, int64_t n, double level, uint32_t least, int logarithms) {
  int64_t whole = n / LANES * LANES;
  for (int64_t at = 0; at < whole; at += CHUNK)
    add(s, x + at, whole - at < CHUNK ? whole - at : CHUNK, level, least, logarithms);
  if (whole < n) add(s, x + whole, n - whole, level, least, logarithms);
}

// Counted is what reaches the bound, which is not negative. out: how many were counted; sum and sum of squares of what
// magnitudes have beyond the level; mantissa and exponent of the product of magnitudes, if logarithms are wanted.
EXPORT void ls_sums(const float *x, int64_t n, int32_t logarithms, double level, float bound, double *out) {
  lanes s = {{0}};
  for (int j = 0; j < LANES; j++) s.product[j] = 1;
  if (logarithms)
    add_all(&s, x, n, 0, bits_of(bound), 1);
  else
    add_all(&s, x, n, level, bits_of(bound), 0);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) {
      s.total[i] += s.total[i + half], s.squares[i] += s.squares[i + half];
      s.product[i] = mantissa_of(s.product[i] * s.product[i + half], &s.exponent);
    }
  out[0] = (double)s.number, out[1] = s.total[0], out[2] = s.squares[0];
  out[3] = s.product[0], out[4] = (double)(s.exponent - 126 * s.number);
}
