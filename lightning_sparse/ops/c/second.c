// Second values beside those of packed_union.py: their codes in messages, and the largest that were told. The CPU
// formulations of packed_union.py for float32, equal bit for bit.
#include "common.h"
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
