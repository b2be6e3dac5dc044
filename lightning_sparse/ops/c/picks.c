// Work on picks, which are few: telling them, and rounding their values. The CPU formulations of packed_union.py
// for float32, equal bit for bit.
#include "told.h"

#define PART 1024  // elements that are worked on in the first-level cache

// How the integers of a coordinate share a word, as Lanes in packed_union.py has it.
typedef struct {
  float most;     // steps of a value
  int32_t low;    // bits for second values
  int32_t wide;   // whether a coordinate has a word of its own
  int32_t parts;  // of a second value
} lanes_of;

// Twice the power of two that a code stands for, not subnormal.
INLINE float top_of(uint8_t code) { return float_of((code < 1u ? 1u : code > 254u ? 254u : code) << 23); }

// Each of up to PART values in whole steps of its level, raised towards the lowest one by at most so many, and the step.
INLINE void in_steps(const float *values, const int32_t *levels, int64_t count, int32_t lowest, int32_t raise_by,
                     float most, float *steps, float *units) {
  const float integer = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to an integer, half to even
  for (int64_t i = 0; i < count; i++) {
    int32_t level = levels[i], raised = (level == SILENT ? TROUBLE : level) + raise_by;
    raised = raised < lowest ? raised : lowest;
    int32_t biased = (raised > level ? raised : level) + (LOWEST + 127);
    biased = biased < 1 ? 1 : biased > 254 ? 254 : biased;
    // Times the reciprocal of a power of two is exactly what division gives; that of 2**127 is subnormal.
    float unit = float_of((uint32_t)biased << 23);
    float inverse = float_of(biased < 254 ? (uint32_t)(254 - biased) << 23 : 0x00400000u);
    float step = values[i] * inverse;
    step = step > most ? most : step;
    step = step < -most ? -most : step;
    steps[i] = step == step ? (step + integer) - integer : 0;
    units[i] = unit;
  }
}

// Values at the union in steps of powers of two; what travels is listed. With second values, parts of their tops, rounded
// down after `offset` is added, take the low bits; second and tops are missing where there are none. The number of values
// that are not rounded to zero; -1 where an index is outside.
INLINE int64_t round_in_lanes(const float *x, const float *second, int64_t size, const int64_t *indices,
                              const int32_t *levels, const uint8_t *tops, int64_t n, int64_t lowest, int64_t raise_by,
                              const lanes_of by, float offset, int32_t *words, float *units, int64_t *sent,
                              float *rounded) {
  float values[PART], beside[PART], steps[PART];
  int32_t lanes[PART + 1];
  const float parts = (float)by.parts;
  int64_t found = 0;
  for (int64_t start = 0; start < n; start += PART) {
    int64_t count = n - start < PART ? n - start : PART;
    uint64_t outside = 0;
    for (int64_t i = 0; i < count; i++) {
      int64_t j = indices[start + i];
      if (start + i + AHEAD < n) {
        __builtin_prefetch(x + indices[start + i + AHEAD]);
        if (second) __builtin_prefetch(second + indices[start + i + AHEAD]);
      }
      outside |= (uint64_t)j >= (uint64_t)size;
      j = (uint64_t)j < (uint64_t)size ? j : 0;
      values[i] = x[j];
      if (second) beside[i] = second[j];
    }
    if (outside) return -1;
    in_steps(values, levels + start, count, (int32_t)lowest, (int32_t)raise_by, by.most, steps, units + start);
    for (int64_t i = 0; i < count; i++) lanes[i] = (int32_t)((uint32_t)(int32_t)steps[i] << by.low);
    for (int64_t i = 0; second && i < count; i++) {
      float share = beside[i] / top_of(tops[start + i]) * parts + offset;
      share = share > 0 ? share : 0;
      lanes[i] += (int32_t)(share < parts ? share : parts);
    }
    lanes[count] = 0;
    if (by.wide)
      memcpy(words + start, lanes, 4 * (size_t)count);
    else
      for (int64_t i = 0; i < (count + 1) / 2; i++)
        words[start / 2 + i] = (int32_t)((uint32_t)lanes[2 * i] + ((uint32_t)lanes[2 * i + 1] << 16));
    for (int64_t i = 0; i < count; i++) {
      sent[found] = indices[start + i], rounded[found] = steps[i] * units[start + i];
      found += steps[i] != 0;
    }
  }
  return found;
}

// Memory, not the processor, decides how long this takes: asked for ahead, it answers several at once.
// 0; or 1 where an index is not below the size of x, and the work is left undone there.
INLINE int32_t take(const float *x, int64_t size, const int64_t *indices, int64_t n, float *out) {
  for (int64_t i = 0; i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(x + indices[i + AHEAD]);
    if ((uint64_t)indices[i] >= (uint64_t)size) return 1;
    out[i] = x[indices[i]];
  }
  return 0;
}

INLINE int32_t level_of(float step) {
  int exponent;
  if (!(bits_of(step) <= MAGNITUDE && bits_of(step) < INFINITE)) return TROUBLE;
  if (step == 0) return SILENT;
  return (frexpf(step, &exponent) == 0.5f ? exponent - 1 : exponent) - LOWEST;
}

INLINE uint8_t code_of(float x) {
  int exponent = 0;
  if (!(x > 0)) return 1;
  frexpf(x, &exponent);
  exponent += CODE_ZERO;
  return (uint8_t)(exponent < 1 ? 1 : exponent > 255 ? 255 : exponent);
}

// The message of one rank, see packed_union.py; without second values, there are no codes. x has a spare slot behind its
// last coordinate; words is zero; magnitudes have room for the slots. 1 where an index is outside, 2 where indices do not ascend.
EXPORT int32_t ls_tell(const float *x, const float *second, const int64_t *indices, const uint8_t *spare, int32_t count,
                       float most, const form *layout, int32_t *words, float *magnitudes) {
  const form f = *layout;
  const int64_t n = f.slots, bits = 8 + 4 * f.planes;
  uint32_t largest = 0;
  float bounds[CLASSES];
  if (take(x, f.numel + 1, indices, n, magnitudes)) return 1;
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
  for (int64_t plane = 0; plane < f.planes; plane++) {
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
  for (int64_t i = 0; second && i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(second + indices[i + AHEAD]);
    ((uint8_t *)(words + f.seconds))[i] = code_of(second[indices[i]]);
  }
  return 0;
}

// second and tops, what ls_meet gave, are missing where there are no second values.
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
