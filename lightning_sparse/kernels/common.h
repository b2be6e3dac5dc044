// What all files of the library share.
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
#define AHEAD 24  // elements to prefetch in places all over a vector

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
#endif
