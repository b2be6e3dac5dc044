// Values in steps of powers of two: what picks.c and second.c share.
#ifndef ROUNDING_H
#define ROUNDING_H
#include "common.h"

#define LOWEST (-1100)  // as in host_messages.py
#define PART 1024       // elements that are worked on in the first-level cache

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

// Leave in x what of values does not travel, and list the others behind those found before.
INLINE int64_t take_out(float *x, const int64_t *indices, const float *values, const float *steps, const float *units,
                        int64_t count, int64_t found, int64_t *sent, float *rounded) {
  for (int64_t i = 0; i < count; i++) {
    float part = steps[i] * units[i];
    sent[found] = indices[i], rounded[found] = part, x[indices[i]] = values[i] - part;
    found += steps[i] != 0;
  }
  return found;
}
#endif
