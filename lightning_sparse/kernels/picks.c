// Work on picks, which are few: taking and putting values, telling picks, rounding their values. The CPU formulations of
// host_picks.py, host_messages.py and packed_union.py for float32, equal bit for bit.
#include "rounding.h"

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

// The message of one rank, see host_messages.py. words is zero; magnitudes have room for n. 1 where an index is outside,
// 2 where one lies in an earlier block than one before it.
INLINE int32_t tell(const float *x, int64_t size, const int64_t *indices, const uint8_t *spare, int64_t n,
                       int32_t count, float most, int64_t blocks, int32_t *words, float *magnitudes) {
  uint32_t largest = 0;
  int32_t *body = words + 2;
  int64_t half = (n + 1) / 2;
  float bounds[CLASSES];
  if (ls_take(x, size, indices, n, magnitudes)) return 1;
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
  if (blocks) {
    int64_t i = 0, misplaced = 0;
    for (int64_t block = 0; block < blocks; block++) {
      for (; i < n && indices[i] < (block + 1) * OFFSETS; i++) misplaced |= indices[i] < block * OFFSETS;
      body[block] = (int32_t)i;
    }
    for (; i < n; i++) misplaced |= indices[i] < blocks * OFFSETS;
    if (misplaced) return 2;
    body += blocks;
    for (i = 0; i < half; i++) {
      int32_t low = (int16_t)indices[2 * i], high = 2 * i + 1 < n ? (int16_t)indices[2 * i + 1] : 0;
      body[i] = (int32_t)((uint32_t)low + ((uint32_t)high << 16));
    }
    body += half;
  } else {
    for (int64_t i = 0; i < n; i++) body[i] = (int32_t)indices[i];
    body += n;
  }
  uint8_t *nibbles = (uint8_t *)body;
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

// Picks of n messages that ls_tell has written, `stride` words each: of each rank the first `ends` of its slots, one
// rank after another. The largest of all ranks' lowest levels; -1 - r where ls_tell cannot have written rank r's.
EXPORT int32_t ls_hear(const int32_t *words, int64_t n, int64_t stride, int64_t slots, const int64_t *ends,
                       int64_t blocks, int64_t padding, int64_t *places, int64_t *levels, uint8_t *spare) {
  int64_t lowest = SILENT;
  for (int64_t r = 0; r < n; words += stride, places += ends[r], levels += ends[r], spare += ends[r], r++) {
    const int32_t *body = words + 2;
    const uint8_t *nibbles = (const uint8_t *)(body + (blocks ? blocks + (slots + 1) / 2 : slots));
    int64_t top = words[1], least = top, end = ends[r], i = 0, before = 0;
    if (top < SILENT || (top >= LEVELS && top != TROUBLE)) return (int32_t)(-1 - r);
    for (int64_t block = 0; blocks && block <= blocks; block++) {
      int64_t last = block < blocks && body[block] < end ? body[block] : end;
      if (block < blocks && (body[block] < before || body[block] > slots)) return (int32_t)(-1 - r);
      before = block < blocks ? body[block] : before;
      for (; i < last; i++) {
        int64_t place = block * OFFSETS + offset_in(body + blocks, i);
        places[i] = place < padding ? place : padding;
      }
    }
    for (; i < end; i++) {
      if (body[i] < 0 || body[i] > padding) return (int32_t)(-1 - r);
      places[i] = body[i];
    }
    for (i = 0; i < end; i++) {
      int32_t nibble = nibbles[i / 2] >> 4 * (i % 2) & 15;
      int64_t level = top - (nibble & (CLASSES - 1)) * CLASS_BITS;
      levels[i] = level > SILENT ? level : SILENT;
      spare[i] = (uint8_t)(nibble >> 3);
      least = levels[i] < least ? levels[i] : least;
    }
    lowest = least > lowest ? least : lowest;
  }
  return (int32_t)lowest;
}

#define VARIANTS(name, target)                                                                                         \
  target static int32_t tell_##name(const float *x, int64_t size, const int64_t *indices, const uint8_t *spare,        \
                                    int64_t n, int32_t count, float most, int64_t blocks, int32_t *words,              \
                                    float *magnitudes) {                                                               \
    return tell(x, size, indices, spare, n, count, most, blocks, words, magnitudes);                                   \
  }                                                                                                                    \
  target static int64_t round_at_##name(float *x, int64_t size, const int64_t *indices, const int32_t *levels,   \
                                        int64_t n, int64_t lowest, int64_t raise_by, float most, int32_t *words,       \
                                        float *units, int64_t *sent, float *rounded) {                                 \
    const lanes_of by = {most, 0, 0, 0};                                                                               \
    return round_in_lanes(x, NULL, size, indices, levels, NULL, n, lowest, raise_by, by, 0, words, units, sent,        \
                          rounded);                                                                                    \
  }                                                                                                                    \
  target static void average_##name(const int32_t *words, const float *units, int64_t n, float ranks, float *values) { \
    const lanes_of by = {0, 0, 0, 0};                                                                                  \
    average_lanes(words, units, NULL, n, ranks, by, values, NULL);                                                     \
  }

VARIANTS(portable, )
#ifdef STREAMS
VARIANTS(avx2, AVX2)
VARIANTS(avx512, AVX512)
#endif

EXPORT int32_t ls_tell(const float *x, int64_t size, const int64_t *indices, const uint8_t *spare, int64_t n,
                       int32_t count, float most, int64_t blocks, int32_t *words, float *magnitudes) {
  return PICK(tell)(x, size, indices, spare, n, count, most, blocks, words, magnitudes);
}
EXPORT int64_t ls_round(float *x, int64_t size, const int64_t *indices, const int32_t *levels, int64_t n,
                        int64_t lowest, int64_t raise_by, float most, int32_t *words, float *units, int64_t *sent,
                        float *rounded) {
  return PICK(round_at)(x, size, indices, levels, n, lowest, raise_by, most, words, units, sent, rounded);
}
EXPORT void ls_average(const int32_t *words, const float *units, int64_t n, float ranks, float *values) {
  PICK(average)(words, units, n, ranks, values);
}
