// Second values beside those of packed_union.py: their codes in messages, the largest that were told, and both kinds of
// values in one integer. The CPU formulations of packed_union.py for float32, equal bit for bit.
#include "rounding.h"
#include "told.h"

#define CODE_ZERO 128  // as in packed_union.py

INLINE uint8_t code_of(float x) {
  int exponent = 0;
  if (!(x > 0)) return 1;
  frexpf(x, &exponent);
  exponent += CODE_ZERO;
  return (uint8_t)(exponent < 1 ? 1 : exponent > 255 ? 255 : exponent);
}

// Codes of second values at n indices; 1 where an index is not below the size of x.
EXPORT int32_t ls_codes(const float *x, int64_t size, const int64_t *indices, int64_t n, uint8_t *codes) {
  for (int64_t i = 0; i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(x + indices[i + AHEAD]);
    if ((uint64_t)indices[i] >= (uint64_t)size) return 1;
    codes[i] = code_of(x[indices[i]]);
  }
  return 0;
}

// The largest code that any of n messages tells for each of `size` ascending coordinates below numel. The messages are
// those that ls_meet has read, with codes behind them, a byte for each slot. told: OFFSETS bytes, zero, and left so.
EXPORT void ls_tops(const int32_t *words, int64_t n, int64_t stride, int64_t numel, int64_t slots, int64_t bits,
                    const int64_t *indices, int64_t size, uint8_t *told, reader *readers, uint8_t *tops) {
  const form f = form_of(numel, slots, bits);
  int64_t next = 0;
  for (int64_t r = 0; r < n; r++) begin_reading(readers + r, words + r * stride, f);
  for (int64_t start = 0; start < numel; start += OFFSETS) {
    for (int64_t r = 0; r < n; r++) {
      reader at = readers[n + r] = readers[r];
      const uint8_t *codes = (const uint8_t *)(at.row + f.seconds);
      for (; at.i < at.last && at.place < start + OFFSETS; next_pick(&at, f))
        if (codes[at.i] > told[at.place - start]) told[at.place - start] = codes[at.i];
      readers[r] = at;
    }
    for (; next < size && indices[next] < start + OFFSETS; next++) tops[next] = told[indices[next] - start];
    for (int64_t r = 0; r < n; r++)
      for (reader at = readers[n + r]; at.i < readers[r].i; next_pick(&at, f)) told[at.place - start] = 0;
  }
}

#define VARIANTS(suffix, target)                                                                                       \
  target static int64_t round_both_##suffix(const float *x, const float *second, int64_t size,                         \
                                            const int64_t *indices, const int32_t *levels, const uint8_t *tops,        \
                                            int64_t n, int64_t lowest, int64_t raise_by, const lanes_of by,            \
                                            float offset, int32_t *words, float *units, int64_t *sent,                 \
                                            float *rounded) {                                                          \
    return round_in_lanes(x, second, size, indices, levels, tops, n, lowest, raise_by, by, offset, words, units, sent, \
                          rounded);                                                                                    \
  }                                                                                                                    \
  target static void average_both_##suffix(const int32_t *words, const float *units, const uint8_t *tops, int64_t n,   \
                                           float ranks, const lanes_of by, float *values, float *seconds) {            \
    average_lanes(words, units, tops, n, ranks, by, values, seconds);                                                  \
  }

VARIANTS(portable, )
#ifdef X86
VARIANTS(avx2, AVX2)
VARIANTS(avx512, AVX512)
#endif

// The arguments of ls_round, and second values, what ls_tops gave, and how both share words.
EXPORT int64_t ls_round_both(const float *x, const float *second, int64_t size, const int64_t *indices,
                             const int32_t *levels, const uint8_t *tops, int64_t n, int64_t lowest, int64_t raise_by,
                             float most, int32_t low, int32_t wide, int32_t parts, float offset, int32_t *words,
                             float *units, int64_t *sent, float *rounded) {
  const lanes_of by = {most, low, wide, parts};
  return PICK(round_both)(x, second, size, indices, levels, tops, n, lowest, raise_by, by, offset, words, units, sent,
                          rounded);
}

EXPORT void ls_average_both(const int32_t *words, const float *units, const uint8_t *tops, int64_t n, float ranks,
                            int32_t low, int32_t wide, int32_t parts, float *values, float *seconds) {
  const lanes_of by = {0, low, wide, parts};
  PICK(average_both)(words, units, tops, n, ranks, by, values, seconds);
}
