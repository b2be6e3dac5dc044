// Values in steps of powers of two, alone or with second values in the same words.
#ifndef ROUNDING_H
#define ROUNDING_H
#include "common.h"

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

// Means over ranks of values, and of second values where there are tops, from sums of words.
INLINE void average_lanes(const int32_t *words, const float *units, const uint8_t *tops, int64_t n, float ranks,
                          const lanes_of by, float *values, float *seconds) {
  const int32_t mask = (1 << by.low) - 1;
  for (int64_t i = 0; i < n; i++) {
    int32_t lane = by.wide ? words[i] : (int16_t)words[i / 2];
    if (!by.wide && i % 2) lane = (int32_t)((uint32_t)words[i / 2] - (uint32_t)lane) >> 16;
    values[i] = (float)(lane >> by.low) * units[i] / ranks;
    if (!tops) continue;
    float top = top_of(tops[i]), mean = (float)(lane & mask) * (top / (ranks * (float)by.parts));
    float least = top / (4 * ranks);  // whoever has told has a quarter of the top there at least
    seconds[i] = mean > least ? mean : least;
  }
}
#endif
