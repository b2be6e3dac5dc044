// What all files of the library share; constants of messages come from form.py, see library.py.
#ifndef COMMON_H
#define COMMON_H
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define MAGNITUDE 0x7fffffffu  // bits of a float32 without its sign
#define INFINITE 0x7f800000u
#define OFFSETS 65536  // coordinates that are worked on in a table
#define STRIP 64  // elements that are worked on in registers
#define AHEAD 48  // elements to prefetch in places all over a vector

// All is compiled once for each set of instructions, see library.py; the compiler says for which one this is.
#ifdef __AVX2__
#include <immintrin.h>
#endif

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

INLINE float from_half(uint16_t h) {
  uint32_t b = (uint32_t)(h & 0x7fff) << 13, exponent = b & 0x0f800000;
  uint32_t finite = b + (112u << 23), other = b + (224u << 23);
  float subnormal = float_of(b + (113u << 23)) - float_of(113u << 23);
  uint32_t found = exponent == 0x0f800000 ? other : exponent ? finite : bits_of(subnormal);
  return float_of(found | (uint32_t)(h & 0x8000) << 16);
}

// 64 elements of a gradient as float32, where they lie or widened.
INLINE const float *widened(const void *grad, int kind, int64_t at, int64_t n, float *wide) {
  const uint16_t *g = (const uint16_t *)grad + at;
  if (kind == 0) return (const float *)grad + at;
  for (int64_t j = 0; j < n; j++) wide[j] = kind == 1 ? float_of((uint32_t)g[j] << 16) : from_half(g[j]);
  return wide;
}
#endif
