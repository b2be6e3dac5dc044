// Work on picks, which are few: choosing them, telling them, uniting those of all ranks, rounding their values. The CPU
// formulations of host.py and packed.py for float32, equal bit for bit.
#include "common.h"

#define BINS 2048
#define BLOCK 65536  // coordinates that a 16-bit offset can tell apart
#define WORDS (BLOCK / 64)
#define CLASSES 8
#define CLASS_BITS 3
#define LOWEST (-1100)
#define SILENT 0
#define TROUBLE ((1 << 20) - 1)

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

// Of n bit patterns, the one that k of them reach; spare has room for n. Order of bits is order of magnitudes.
static uint32_t kth_of(const uint32_t *m, int64_t n, int64_t k, uint32_t *spare) {
  static const int SHIFT[3] = {20, 9, 0}, COUNT[3] = {BINS, BINS, 512};
  uint32_t kth = 0;
  for (int level = 0; level < 3; level++) {
    uint32_t bins[4][BINS] = {{0}}, mask = (uint32_t)COUNT[level] - 1, bin = mask;
    int64_t above = 0, i = 0, left = 0;
    for (; i + 4 <= n; i += 4)  // neighbours count apart, so that equal ones need not wait for each other
      for (int j = 0; j < 4; j++) bins[j][m[i + j] >> SHIFT[level] & mask]++;
    for (; i < n; i++) bins[0][m[i] >> SHIFT[level] & mask]++;
    for (;; bin--) {
      int64_t here = (int64_t)bins[0][bin] + bins[1][bin] + bins[2][bin] + bins[3][bin];
      if (!bin || above + here >= k) break;
      above += here;
    }
    k -= above, kth |= bin << SHIFT[level];
    if (level == 2) break;
    for (i = 0; i < n; i++) {
      spare[left] = m[i];
      left += (m[i] >> SHIFT[level] & mask) == bin;
    }
    m = spare, n = left;
  }
  return kth;
}

// Places of the k largest of n magnitudes, ascending, of equal ones the first; and what `more` of them reach, or, where
// there are not so many, what k of them reach. places and spare have room for n.
EXPORT int64_t ls_best(const float *magnitudes, int64_t n, int64_t k, int64_t more, int32_t *places, uint32_t *spare,
                       float *reached) {
  const uint32_t *m = (const uint32_t *)magnitudes;
  uint32_t kth = kth_of(m, n, k, spare);
  int64_t larger = 0, equal, found = 0;
  *reached = more < n && more != k ? float_of(kth_of(m, n, more, spare)) : float_of(kth);
  for (int64_t i = 0; i < n; i++) larger += m[i] > kth;
  equal = k - larger;
  for (int64_t i = 0; i < n; i++) {
    int same = m[i] == kth && equal > 0;
    places[found] = (int32_t)i;
    found += (m[i] > kth) | same;
    equal -= same;
    if (found == k) break;
  }
  return found;
}

// Of n coordinates and their magnitudes: 2 j for the largest j, as many as `share`, and 2 j + 1 for the largest of the
// others with j mod ranks = turn, as many as `spare`; ascending. 0 and nothing done, where there are not so many others.
// reached: what `more` of all reach. keys, and twice spares, have room for n.
EXPORT int64_t ls_top_and_stripe(const int32_t *indices, const float *magnitudes, int64_t n, int64_t share, int64_t spare,
                                 int64_t turn, int64_t ranks, int64_t more, int64_t *keys, uint32_t *spares,
                                 float *reached) {
  const uint32_t *m = (const uint32_t *)magnitudes;
  const uint64_t inverse = UINT64_MAX / (uint64_t)ranks + 1;  // a 32-bit number times this is small for multiples alone
  uint32_t top = share ? kth_of(m, n, share, spares) : UINT32_MAX, next = UINT32_MAX, *others = spares + n;
  int64_t ties = share, also = spare, own = 0, found = 0;
  *reached = float_of(kth_of(m, n, more, spares));
  for (int64_t i = 0; i < n; i++) ties -= m[i] > top;
  for (int64_t i = 0, equal = ties; i < n; i++) {
    int first = m[i] > top, tie = m[i] == top && equal > 0;
    int inside = ranks == 1 || (uint64_t)(indices[i] + ranks - turn) * inverse < inverse;
    equal -= tie;
    others[own] = m[i];
    own += inside & !(first | tie);
  }
  if (own < spare) return 0;
  if (spare) {
    next = kth_of(others, own, spare, spares);
    for (int64_t i = 0; i < own; i++) also -= others[i] > next;
  }
  for (int64_t i = 0; i < n; i++) {
    int tie = m[i] == top && ties > 0, first = (m[i] > top) | tie;
    int inside = ranks == 1 || (uint64_t)(indices[i] + ranks - turn) * inverse < inverse;
    int other = inside & !first, level = other && m[i] == next && also > 0, second = other & ((m[i] > next) | level);
    ties -= tie, also -= level;
    keys[found] = 2 * (int64_t)indices[i] + second;
    found += first | second;
  }
  return found;
}

INLINE int32_t level_of(float step) {
  int exponent;
  if (!(bits_of(step) <= MAGNITUDE && bits_of(step) < INFINITE)) return TROUBLE;
  if (step == 0) return SILENT;
  return (frexpf(step, &exponent) == 0.5f ? exponent - 1 : exponent) - LOWEST;
}

// The message of one rank, see packed.py. words is zero; magnitudes have room for n. 1 where an index is outside.
EXPORT int32_t ls_tell(const float *x, int64_t size, const int64_t *indices, const uint8_t *spare, int64_t n,
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
    int64_t i = 0;
    for (int64_t block = 0; block < blocks; block++) {
      while (i < n && indices[i] < (block + 1) * BLOCK) i++;
      body[block] = (int32_t)i;
    }
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
  for (int64_t i = 0; i < n; i++) {
    int class = 0;
    for (int c = 1; c < CLASSES; c++) class += magnitudes[i] <= bounds[c];
    if (spare) class |= (spare[i] != 0) << 3;
    nibbles[i / 2] |= (uint8_t)(class << 4 * (i % 2));
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
    if (top < SILENT || top > TROUBLE) return (int32_t)(-1 - r);
    for (int64_t block = 0; blocks && block <= blocks; block++) {
      int64_t last = block < blocks && body[block] < end ? body[block] : end;
      if (block < blocks && (body[block] < before || body[block] > slots)) return (int32_t)(-1 - r);
      before = block < blocks ? body[block] : before;
      for (; i < last; i++) {
        uint32_t word = (uint32_t)body[blocks + i / 2], low = word & 0xffff;
        int64_t place = block * BLOCK + (i % 2 ? ((word >> 16) + (low >> 15)) & 0xffff : low);
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

// One block after another: a bit for each coordinate that was named, bits for words of these, and what was said of it.
typedef struct {
  uint64_t named[WORDS], some[WORDS / 64];
  uint32_t said[BLOCK];
} table;

#define FIRST (1u << 31)  // somebody has named it, and not as a spare one

// What a table holds: coordinates, from its first one on, and what was said of them; behind those found before.
static int64_t emptied(table *t, int64_t start, int64_t found, int64_t *places, uint32_t *said) {
  for (int64_t group = 0; group < WORDS / 64; group++)
    for (uint64_t some = t->some[group]; some; some &= some - 1) {
      int64_t word = 64 * group + __builtin_ctzll(some);
      for (uint64_t bits = t->named[word]; bits; bits &= bits - 1, found++) {
        int64_t offset = 64 * word + __builtin_ctzll(bits);
        places[found] = start + offset, said[found] = t->said[offset];
        t->said[offset] = 0;
      }
      t->named[word] = 0;
    }
  memset(t->some, 0, sizeof t->some);
  return found;
}

// Whether something below padding was passed over in n lists, of which each was looked at as far as it ascends.
static int left_over(const int64_t *places, const int64_t *at, int64_t n, int64_t padding) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = at[2 * r]; i < at[2 * r + 1]; i++)
      if (places[i] < padding) return 1;
  return 0;
}

// The union of n lists that ascend, below padding: coordinates and largest levels; thinned evenly to a limit, spare ones
// first; -1 where one does not ascend. levels and spare may be missing. named: how many there were. Tables: as many bytes
// as ls_table says, zero, and left so. united and said have room for the sum of the lengths.
EXPORT int64_t ls_unite(const int64_t *places, const int64_t *levels, const uint8_t *spare, const int64_t *lengths,
                        int64_t n, int64_t padding, int64_t limit, int64_t phase, table *t, int64_t *at,
                        int64_t *united, uint32_t *said, int64_t *united_levels, int64_t *named) {
  int64_t found = 0, first = 0, begin = 0, kept = 0;
  for (int64_t r = 0; r < n; begin += lengths[r++]) at[2 * r] = begin, at[2 * r + 1] = begin + lengths[r];
  for (int64_t start = 0; start < padding; start += BLOCK) {
    int64_t end = start + BLOCK < padding ? start + BLOCK : padding;
    for (int64_t r = 0; r < n; r++) {
      int64_t i = at[2 * r], last = at[2 * r + 1];
      for (; i < last && places[i] >= start && places[i] < end; i++) {
        uint32_t offset = (uint32_t)(places[i] - start), before = t->said[offset];
        uint32_t level = levels ? (uint32_t)levels[i] : 0, old = before & ~FIRST;
        uint32_t flag = spare && spare[i] ? 0 : FIRST;
        t->said[offset] = (level > old ? level : old) | (before & FIRST) | flag;
        t->named[offset / 64] |= 1ull << offset % 64;
        t->some[offset / 4096] |= 1ull << offset / 64 % 64;
      }
      at[2 * r] = i;
    }
    found = emptied(t, start, found, united, said);
  }
  if (left_over(places, at, n, padding)) return -1;
  for (int64_t i = 0; i < found; i++) first += said[i] >> 31;
  *named = found;
  int64_t total[2] = {found - first, first}, room[2], sum[2];
  room[1] = first < limit ? first : limit;
  room[0] = limit - room[1] < total[0] ? limit - room[1] : total[0];
  for (int f = 0; f < 2; f++) sum[f] = total[f] ? phase % total[f] : 0;
  for (int64_t i = 0; i < found; i++) {  // the one of ordinal o stays where (o room + phase) mod total < room
    int f = said[i] >> 31;
    sum[f] += room[f];
    sum[f] -= sum[f] >= total[f] ? total[f] : 0;
    united[kept] = united[i], united_levels[kept] = said[i] & ~FIRST;
    kept += sum[f] < room[f];
  }
  return kept;
}

// Sums of n vectors, given at coordinates that ascend, below padding, from zero in the order of the vectors. -1 where
// some do not ascend. Otherwise as ls_unite.
EXPORT int64_t ls_add_up(const int64_t *places, const float *values, const int64_t *lengths, int64_t n, int64_t padding,
                         table *t, int64_t *at, int64_t *united, float *totals) {
  int64_t found = 0, begin = 0;
  for (int64_t r = 0; r < n; begin += lengths[r++]) at[2 * r] = begin, at[2 * r + 1] = begin + lengths[r];
  for (int64_t start = 0; start < padding; start += BLOCK) {
    int64_t end = start + BLOCK < padding ? start + BLOCK : padding;
    for (int64_t r = 0; r < n; r++) {
      int64_t i = at[2 * r], last = at[2 * r + 1];
      for (; i < last && places[i] >= start && places[i] < end; i++) {
        uint32_t offset = (uint32_t)(places[i] - start);
        t->said[offset] = bits_of(float_of(t->said[offset]) + values[i]);
        t->named[offset / 64] |= 1ull << offset % 64;
        t->some[offset / 4096] |= 1ull << offset / 64 % 64;
      }
      at[2 * r] = i;
    }
    found = emptied(t, start, found, united, (uint32_t *)totals);
  }
  return left_over(places, at, n, padding) ? -1 : found;
}

EXPORT int64_t ls_table(void) { return (int64_t)sizeof(table); }

// Values at the union in steps of powers of two, two in each word; what of them travels, and what is left of them. The
// number of values that are not rounded to zero; -1 where an index is outside.
EXPORT int64_t ls_round(const float *x, int64_t size, const int64_t *indices, const int64_t *levels, int64_t n,
                        int64_t lowest, int64_t raise_by, float most, int32_t *words, float *units, int64_t *sent,
                        float *rounded, float *left) {
  const float integer = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to an integer, half to even
  int64_t found = 0;
  if (n) memset(words, 0, 4 * (size_t)((n + 1) / 2));
  for (int64_t i = 0; i < n; i++) {
    if (i + AHEAD < n) __builtin_prefetch(x + indices[i + AHEAD]);
    if ((uint64_t)indices[i] >= (uint64_t)size) return -1;
    int64_t raised = (levels[i] == SILENT ? TROUBLE : levels[i]) + raise_by;
    int64_t level = raised < lowest ? raised : lowest;
    int64_t biased = (level > levels[i] ? level : levels[i]) + (LOWEST + 127);
    biased = biased < 1 ? 1 : biased > 254 ? 254 : biased;
    float unit = float_of((uint32_t)biased << 23), value = x[indices[i]], steps = value / unit;
    steps = steps > most ? most : steps < -most ? -most : steps;
    steps = steps == steps ? (steps + integer) - integer : 0;
    uint32_t lane = (uint32_t)(int32_t)steps;
    words[i / 2] = (int32_t)((uint32_t)words[i / 2] + (i % 2 ? lane << 16 : lane));
    units[i] = unit;
    sent[found] = indices[i], rounded[found] = steps * unit, left[found] = value - rounded[found];
    found += steps != 0;
  }
  return found;
}

// Means over ranks from sums of words.
EXPORT void ls_average(const int32_t *words, const float *units, int64_t n, float ranks, float *values) {
  for (int64_t i = 0; i < n; i++) {
    int32_t word = words[i / 2], low = (int16_t)word;
    int32_t total = i % 2 ? (int32_t)((uint32_t)word - (uint32_t)low) >> 16 : low;
    values[i] = (float)total * units[i] / ranks;
  }
}
