// Sums of a vector that is gone through in pieces: in the order of host_sums.py, so that any pieces give the same bits.
#ifndef LANES_H
#define LANES_H
#include "common.h"

#define CHUNK 65536  // as in host_sums.py
#define LANES 256    // as in host_sums.py, and the next four: few enough to leave room in the first-level cache
#define VALUES 1
#define MAGNITUDES 2
#define LOGARITHMS 3
#define BEYOND 4
#define ROWS 8       // that are added up in registers
#define WIDTH 16     // elements that the compiler sees at once
#define SMALLEST 0x00800000u  // bits of the smallest normal number

#define ALIGNED __attribute__((aligned(64)))

// Part j is that of elements j, j + LANES, ...: those of a chunk, and then chunk by chunk.
typedef struct {
  ALIGNED double total[LANES];
  ALIGNED double squares[LANES];
  ALIGNED double product[LANES];
  ALIGNED double part[3][LANES];  // of all three, of this chunk
  ALIGNED uint32_t numbers[WIDTH];
  ALIGNED uint32_t exponents[WIDTH];
  ALIGNED uint32_t largest[WIDTH];
  int64_t kind, numel, due;  // parts are added to totals at the coordinate `due`
  int64_t number, exponent;
  double level;    // BEYOND: what is taken from magnitudes
  uint32_t least;  // bits of the magnitude from which on they are counted
} lanes;

INLINE void begin_sums(lanes *s, int64_t kind, int64_t numel, double level, uint32_t least) {
  memset(s, 0, sizeof *s);
  s->kind = kind, s->numel = numel, s->level = level, s->least = least;
  s->due = numel < CHUNK ? numel / LANES * LANES : CHUNK;
  for (int j = 0; j < LANES; j++) s->product[j] = s->part[2][j] = 1;
}

// The number from 1/2 on and below 1 of which x > 0 is a multiple by a power of two; the exponent is added to another.
INLINE double mantissa_of(double x, int64_t *exponent) {
  uint64_t b;
  memcpy(&b, &x, 8);
  *exponent += (int64_t)(b >> 52) - 1022;
  b = (b & 0xfffffffffffffull) | 0x3fe0000000000000ull;
  memcpy(&x, &b, 8);
  return x;
}

INLINE void end_chunk(lanes *s) {
  int64_t exponent = 0;
  for (int j = 0; j < LANES; j++) s->total[j] += s->part[0][j], s->squares[j] += s->part[1][j];
  for (int j = 0; j < LANES; j++) s->product[j] = mantissa_of(s->product[j] * s->part[2][j], &exponent);
  for (int j = 0; j < WIDTH; j++) s->number += s->numbers[j], exponent += s->exponents[j];
  s->exponent += exponent;
  memset(s->part, 0, sizeof s->part);
  memset(s->numbers, 0, sizeof s->numbers), memset(s->exponents, 0, sizeof s->exponents);
  for (int j = 0; j < LANES; j++) s->part[2][j] = 1;
}

// Up to WIDTH elements of each of some rows, one below the other, which belong to the lanes from one on.
INLINE void add_few(lanes *s, int64_t lane, const float *x, int64_t n, int rows, int kind) {
  double *restrict part = s->part[0] + lane, *restrict second = s->part[1] + lane, *restrict third = s->part[2] + lane;
  uint32_t *restrict numbers = s->numbers, *restrict exponents = s->exponents, *restrict largest = s->largest;
  const double level = s->level;
  const uint32_t least = s->least;
  for (int64_t j = 0; j < n; j++) {
    double sum = part[j], squares = second[j], product = third[j];
    uint32_t number = numbers[j], exponent = exponents[j], top = largest[j];
    for (int row = 0; row < rows; row++) {
      float value = x[j + row * LANES];
      uint32_t m = bits_of(value) & MAGNITUDE;
      double z = kind == VALUES ? value : fabsf(value), over = z - level;
      if (kind == BEYOND) z = over > 0 ? over : 0;
      sum += z, squares += z * z;
      uint32_t counted = (m >= least) & (m <= INFINITE);
      number += counted, top = m > top ? m : top;
      exponent += counted ? m >> 23 : 0;
      product *= float_of(counted ? (m & (SMALLEST - 1)) | 0x3f000000u : 0x3f800000u);
    }
    part[j] = sum, second[j] = squares;
    if (kind != VALUES) numbers[j] = number, largest[j] = top;
    if (kind == LOGARITHMS) third[j] = product, exponents[j] = exponent;
  }
}

INLINE void add_rows(lanes *s, int64_t lane, const float *x, const float *next, int64_t n, int rows, int kind) {
  int64_t j = 0;
  for (; j + WIDTH <= n; j += WIDTH) {
    for (int row = 0; row < rows; row++) __builtin_prefetch(next + j + row * LANES);
    add_few(s, lane + j, x + j, WIDTH, rows, kind);
  }
  add_few(s, lane + j, x + j, n - j, rows, kind);
}

INLINE void add_elements(lanes *s, int64_t at, const float *x, const float *next, int64_t n, int kind) {
  for (int64_t size; n; at += size, x += size, next += size, n -= size) {
    if (at == s->due) {
      int64_t last = s->numel / LANES * LANES;
      end_chunk(s), s->due = at == last ? s->numel : last - at < CHUNK ? last : at + CHUNK;
    }
    int64_t lane = at % LANES, before = LANES - lane, room = s->due - at < n ? s->due - at : n;
    if (room >= ROWS * LANES) {
      size = ROWS * LANES;
      add_rows(s, lane, x, next, before, ROWS, kind), add_rows(s, 0, x + before, next + before, lane, ROWS, kind);
    } else {
      size = room < before ? room : before;
      add_rows(s, lane, x, next, size, 1, kind);
    }
  }
}

// n elements of a vector from a coordinate on; all before it have been added. next: as many that are needed soon.
INLINE void add_to(lanes *s, int64_t at, const float *x, const float *next, int64_t n) {
  switch (s->kind) {
    case VALUES: add_elements(s, at, x, next, n, VALUES); break;
    case MAGNITUDES: add_elements(s, at, x, next, n, MAGNITUDES); break;
    case LOGARITHMS: add_elements(s, at, x, next, n, LOGARITHMS); break;
    case BEYOND: add_elements(s, at, x, next, n, BEYOND); break;
  }
}

// How many were counted; sum, sum of squares, and largest magnitude; mantissa and exponent of the product of magnitudes.
INLINE void end_sums(lanes *s, double *out) {
  uint32_t largest = 0;
  end_chunk(s);
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) {
      s->total[i] += s->total[i + half], s->squares[i] += s->squares[i + half];
      s->product[i] = mantissa_of(s->product[i] * s->product[i + half], &s->exponent);
    }
  for (int j = 0; j < WIDTH; j++) largest = s->largest[j] > largest ? s->largest[j] : largest;
  out[0] = (double)s->number, out[1] = s->total[0], out[2] = s->squares[0], out[3] = (double)float_of(largest);
  out[4] = s->product[0], out[5] = (double)(s->exponent - 126 * s->number);
}
#endif
