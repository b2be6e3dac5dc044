// The fingerprint of a vector, whatever its elements are: words of 32 bits, each times a factor, are added up modulo
// 2^64. A word that changes alone always changes it.
#include "common.h"

// Words begin anywhere.
INLINE uint64_t row_of(const char *restrict words, const uint32_t *restrict factors, int64_t n) {
  uint64_t sum = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t word;
    memcpy(&word, words + 4 * j, 4);
    sum += (uint64_t)word * factors[j];
  }
  return sum;
}

// Rows are as long as there are factors. Bytes that fill no word are one with zeros.
EXPORT int64_t ls_fingerprint(const void *vector, int64_t bytes, const uint32_t *factors, int64_t width) {
  const char *words = vector;
  int64_t n = bytes / 4, rows = n / width;
  uint64_t sum = 0;
  uint32_t last = 0;
  for (int64_t row = 0; row < rows; row++) sum += row_of(words + 4 * row * width, factors, width);
  sum += row_of(words + 4 * rows * width, factors, n - rows * width);
  memcpy(&last, words + 4 * n, (size_t)(bytes % 4));
  return (int64_t)(sum + (uint64_t)last * factors[n - rows * width]);
}
