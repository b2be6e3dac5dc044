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
#define AHEAD 48  // elements to prefetch in places all over a vector

// All is compiled once for each set of instructions, see library.py; the compiler says for which one this is.
#ifdef __AVX2__
#include <immintrin.h>
#endif

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
#endif
