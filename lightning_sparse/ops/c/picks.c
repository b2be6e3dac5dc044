// Work on picks, which are few: taking and putting values, telling picks, rounding their values. The CPU formulations of
// host_picks.py and packed_union.py for float32, equal bit for bit.
#include "rounding.h"
#include "told.h"

// Memory, not the processor, decides how long these take: asked for ahead, it answers several at once.
// 0; or 1 where an index is not below the size of x, and the work is left undone there.
EXPORT int32_t ls_take(const float *x, int64_t size, const int64_t *indices, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(x + indices[i + AHEAD]);
    if ((uint64_t)indices[i] >= (uint64_t)size) return 1;
    out[i] = x[indices[i]];
  }
  return 0;
}

EXPORT int32_t ls_put(float *x, int64_t size, const int64_t *indices, int64_t n, const float *values) {
  for (int64_t i = 0; i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(x + indices[i + AHEAD], 1);
    if ((uint64_t)indices[i] >= (uint64_t)size) return 1;
    x[indices[i]] = values[i];
  }
  return 0;
}

// Which of n numbers are among m ascending ones; quick where the former ascend, too, but for numbers beyond the latter.
EXPORT void ls_among(const int64_t *values, int64_t n, const int64_t *ordered, int64_t m, uint8_t *out) {
  int64_t place = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t value = values[i];
    out[i] = 0;
    if (!m || value > ordered[m - 1]) continue;
    if (place && ordered[place - 1] >= value) {  // back to the first one that is not below it
      int64_t low = 0;
      for (int64_t high = place; low < high;) {
        int64_t middle = (low + high) / 2;
        if (ordered[middle] < value)
          low = middle + 1;
        else
          high = middle;
      }
      place = low;
    }
    while (ordered[place] < value) place++;
    out[i] = ordered[place] == value;
  }
}

INLINE int32_t level_of(float step) {
  int exponent;
  if (!(bits_of(step) <= MAGNITUDE && bits_of(step) < INFINITE)) return TROUBLE;
  if (step == 0) return SILENT;
  return (frexpf(step, &exponent) == 0.5f ? exponent - 1 : exponent) - LOWEST;
}

// The message of one rank, see packed_union.py. x has a spare slot behind its last coordinate; words is zero; magnitudes
// have room for n. 1 where an index is outside, 2 where indices do not ascend.
EXPORT int32_t ls_tell(const float *x, int64_t numel, const int64_t *indices, const uint8_t *spare, int64_t n,
                       int32_t count, float most, int64_t bits, int32_t *words, float *magnitudes) {
  const form f = form_of(numel, n, bits);
  uint32_t largest = 0;
  float bounds[CLASSES];
  if (ls_take(x, numel + 1, indices, n, magnitudes)) return 1;
  for (int64_t i = 0; i < n; i++) {
    magnitudes[i] = fabsf(magnitudes[i]);
    largest = bits_of(magnitudes[i]) > largest ? bits_of(magnitudes[i]) : largest;
  }
  words[0] = count, words[1] = level_of(float_of(largest) / most);
  for (int c = 0; c < CLASSES; c++) {  // what reaches up to a bound is in its class, rounded down as far as need be
    double bound = ldexp((double)float_of(largest), -CLASS_BITS * c);
    bounds[c] = largest && largest < INFINITE ? (float)bound : -1;
    if ((double)bounds[c] > bound) bounds[c] = float_of(bits_of(bounds[c]) - 1);
  }
  uint64_t descends = 0;
  for (int64_t i = 1; i < n; i++) descends |= indices[i] < indices[i - 1];
  if (descends) return 2;
  for (int64_t i = 0; i < n; i++) {
    uint64_t place = (uint64_t)(indices[i] >> bits) + (uint64_t)i;
    words[MARKS + place / 32] |= (int32_t)(1u << place % 32);
  }
  for (int64_t i = 0; i < n; i++) ((uint8_t *)(words + f.octets))[i] = (uint8_t)indices[i];
  for (int32_t plane = 0; plane < f.planes; plane++) {
    uint8_t *out = (uint8_t *)(words + f.nibbles + plane * ((n + 7) / 8));
    for (int64_t i = 0; i < n; i++) out[i / 2] |= (uint8_t)((indices[i] >> (8 + 4 * plane) & 15) << 4 * (i % 2));
  }
  uint8_t *nibbles = (uint8_t *)(words + f.classes);
  for (int64_t start = 0; start < n; start += PART) {
    int64_t size_of_part = n - start < PART ? n - start : PART;
    uint8_t classes[PART + 1];
    for (int64_t i = 0; i < size_of_part; i++) {
      int32_t class = 0;
      for (int c = 1; c < CLASSES; c++) class += magnitudes[start + i] <= bounds[c];
      classes[i] = (uint8_t)class;
    }
    for (int64_t i = 0; spare && i < size_of_part; i++) classes[i] |= (uint8_t)((spare[start + i] != 0) << 3);
    classes[size_of_part] = 0;
    for (int64_t i = 0; i < (size_of_part + 1) / 2; i++)
      nibbles[start / 2 + i] = (uint8_t)(classes[2 * i] | classes[2 * i + 1] << 4);
  }
  return 0;
}

// second and tops, what ls_tops gave, are missing where there are no second values.
EXPORT int64_t ls_round(const float *x, const float *second, int64_t size, const int64_t *indices,
                        const int32_t *levels, const uint8_t *tops, int64_t n, int64_t lowest, int64_t raise_by,
                        float most, int32_t low, int32_t wide, int32_t parts, float offset, int32_t *words,
                        float *units, int64_t *sent, float *rounded) {
  const lanes_of by = {most, low, wide, parts}, alone = {most, 0, 0, 0};
  if (second)
    return round_in_lanes(x, second, size, indices, levels, tops, n, lowest, raise_by, by, offset, words, units, sent,
                          rounded);
  return round_in_lanes(x, NULL, size, indices, levels, NULL, n, lowest, raise_by, alone, 0, words, units, sent,
                        rounded);
}

EXPORT void ls_average(const int32_t *words, const float *units, const uint8_t *tops, int64_t n, float ranks,
                       int32_t low, int32_t wide, int32_t parts, float *values, float *seconds) {
  const lanes_of by = {0, low, wide, parts}, alone = {0, 0, 0, 0};
  if (tops)
    average_lanes(words, units, tops, n, ranks, by, values, seconds);
  else
    average_lanes(words, units, NULL, n, ranks, alone, values, NULL);
}
