// What all ranks have picked, together: unions of lists that ascend, and sums of sparse vectors. The CPU formulations of
// ops/host.py and packed_union.py for float32, equal bit for bit.
//
// One block of coordinates after another: all ranks' picks in it are entered in a table, which is then read in order.
#include "told.h"

#define WORDS (OFFSETS / 64)
#define HIGHEST 0x7fff  // stands for TROUBLE, and what is a bit lower for what lies as far below it
#define FIRST 1u        // somebody has named it, and not as a spare one; above this bit, the largest level

typedef struct {
  uint64_t named[WORDS];
  union {
    uint16_t said[OFFSETS];
    float sums[OFFSETS];
  } of;
  uint8_t tops[OFFSETS];  // the largest codes of second values
} table;

// Tables have as many bytes as this says, zero, and are left so.
EXPORT int64_t ls_table(void) { return (int64_t)sizeof(table); }

INLINE uint16_t code_of(int64_t level, int spare) {
  int64_t shorter = level > HIGHEST / 2 ? level - TROUBLE + HIGHEST : level;
  return (uint16_t)((shorter < 0 ? 0 : shorter > HIGHEST ? HIGHEST : shorter) << 1 | (spare ? 0 : FIRST));
}

INLINE int32_t level_in(uint16_t code) { return code >> 1 > HIGHEST / 2 ? (code >> 1) - HIGHEST + TROUBLE : code >> 1; }

INLINE void name(table *t, uint32_t offset) { t->named[offset / 64] |= 1ull << offset % 64; }

INLINE void say(table *t, uint32_t offset, uint32_t now) {
  uint32_t before = t->of.said[offset], larger = now > before ? now : before;
  t->of.said[offset] = (uint16_t)(larger | ((now | before) & FIRST));
  name(t, offset);
}

// The coordinates that are named in a table, from its first one on, behind those found before; with room for one more.
INLINE int64_t named_in(table *t, int64_t start, int64_t found, int64_t *places) {
  int32_t some = 0, words[WORDS];
  for (int32_t w = 0; w < WORDS; w++) {  // without a branch that nobody can predict
    words[some] = w;
    some += t->named[w] != 0;
  }
  for (int32_t i = 0; i < some; i++) {
    int64_t base = start + 64 * words[i], end = found;
    uint64_t bits = t->named[words[i]], rest = bits & (bits - 1);
    t->named[words[i]] = 0;
    places[end++] = base + __builtin_ctzll(bits);
    places[end] = base + __builtin_ctzll(rest | 1ull << 63);
    end += rest != 0;
    for (rest &= rest - 1; rest; rest &= rest - 1) places[end++] = base + __builtin_ctzll(rest);
    found = end;
  }
  return found;
}

INLINE int64_t union_in(table *t, int64_t start, int64_t found, int64_t *places, uint16_t *said, uint8_t *tops) {
  int64_t end = named_in(t, start, found, places);
  for (int64_t i = found; i < end; i++) {
    uint32_t offset = (uint32_t)(places[i] - start);
    said[i] = t->of.said[offset], t->of.said[offset] = 0;
    if (tops) tops[i] = t->tops[offset], t->tops[offset] = 0;
  }
  return end;
}

INLINE int64_t sums_in(table *t, int64_t start, int64_t found, int64_t *places, float *totals, float ranks) {
  int64_t end = named_in(t, start, found, places);
  for (int64_t i = found; i < end; i++) {
    uint32_t offset = (uint32_t)(places[i] - start);
    totals[i] = t->of.sums[offset] / ranks, t->of.sums[offset] = 0;
  }
  return end;
}

// Thin a union evenly to a limit, spare ones first; levels as they are told. Of `all` that are thinned to `some`, the one
// of ordinal o stays where (o some + phase) mod all < some.
INLINE int64_t thinned(int64_t found, int64_t limit, int64_t phase, int64_t *places, uint16_t *said, uint8_t *tops,
                       int32_t *levels) {
  int64_t first = 0, kept = found;
  if (found > limit) {
    for (int64_t i = 0; i < found; i++) first += said[i] & FIRST;
    int64_t no_spare = first > limit, all = no_spare ? first : found - first, some = no_spare ? limit : limit - first;
    int64_t sum = phase % all;
    kept = 0;
    for (int64_t i = 0; i < found; i++) {
      int64_t thins = (said[i] & FIRST) == no_spare;
      sum += some & -thins;
      sum -= sum >= all ? all : 0;
      places[kept] = places[i], said[kept] = said[i];
      if (tops) tops[kept] = tops[i];
      kept += thins ? sum < some : !no_spare;
    }
  }
  for (int64_t i = 0; i < kept; i++) levels[i] = level_in(said[i]);
  return kept;
}

// Where each of n lists begins and ends, which lie one behind the other.
INLINE void begin(const int64_t *lengths, int64_t n, int64_t *at) {
  int64_t start = 0;
  for (int64_t r = 0; r < n; start += lengths[r++]) at[2 * r] = start, at[2 * r + 1] = start + lengths[r];
}

// Whether something below padding was passed over in n lists, of which each was looked at as far as it ascends.
INLINE int left_over(const int64_t *places, const int64_t *at, int64_t n, int64_t padding) {
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = at[2 * r]; i < at[2 * r + 1]; i++)
      if (places[i] < padding) return 1;
  return 0;
}

// The union of n lists that ascend, below padding: coordinates and largest levels; thinned evenly to a limit, spare ones
// first; -1 where one does not ascend. levels and spare may be missing. named: how many there were. What is written has
// room for the sum of the lengths and 16 more; at for 2 n.
EXPORT int64_t ls_unite(const int64_t *places, const int64_t *levels, const uint8_t *spare, const int64_t *lengths,
                        int64_t n, int64_t padding, int64_t limit, int64_t phase, table *t, int64_t *at,
                        int64_t *united, uint16_t *said, int32_t *united_levels, int64_t *named) {
  int64_t found = 0;
  begin(lengths, n, at);
  for (int64_t start = 0; start < padding; start += OFFSETS) {
    int64_t end = start + OFFSETS < padding ? start + OFFSETS : padding;
    for (int64_t r = 0; r < n; r++) {
      int64_t i = at[2 * r], last = at[2 * r + 1];
      for (; i < last && places[i] >= start && places[i] < end; i++)
        say(t, (uint32_t)(places[i] - start), code_of(levels ? levels[i] : 0, spare && spare[i]));
      at[2 * r] = i;
    }
    found = union_in(t, start, found, united, said, NULL);
  }
  *named = found;
  return left_over(places, at, n, padding) ? -1 : thinned(found, limit, phase, united, said, NULL, united_levels);
}

// Whether ls_tell has written a message, as far as it can be seen.
INLINE int is_possible(const int32_t *row, const form f) {
  int64_t marks = 0;
  for (int64_t i = MARKS; i < f.octets; i++) marks += __builtin_popcount((uint32_t)row[i]);
  return marks == f.slots && row[0] >= 0 && row[0] <= f.slots && row[1] >= SILENT && (row[1] < LEVELS || row[1] == TROUBLE);
}

// The first rank whose message ls_tell cannot have written: not possible, or coordinates that descend.
INLINE int64_t wrong_one(const int32_t *words, int64_t n, int64_t stride, const form f) {
  for (int64_t r = 0; r < n; r++) {
    reader at;
    if (!is_possible(words + r * stride, f)) return r;
    for (begin_reading(&at, words + r * stride, f); at.i < at.last;) next_pick(&at, f);
    if (at.descends) return r;
  }
  return n;
}

typedef struct {
  reader at;
  uint16_t codes[2 * CLASSES];  // of its levels, by class, and of those of spare picks
} speaker;

// See ls_meet.
INLINE int64_t meet(const int32_t *words, int64_t n, int64_t stride, const form f, int32_t spares, int64_t limit,
                    int64_t phase, table *t, speaker *ranks, int64_t *united, uint16_t *said, uint8_t *tops,
                    int32_t *levels, int64_t *numbers) {
  int64_t found = 0, lowest = SILENT, top = SILENT;
  for (int64_t r = 0; r < n; r++) {
    const int32_t *row = words + r * stride;
    const uint8_t *nibbles = (const uint8_t *)(row + f.classes);
    if (!is_possible(row, f)) return -1 - wrong_one(words, n, stride, f);
    int64_t last = row[0];
    uint8_t highest = last % 2 ? nibbles[last / 2] & 7 : 0;
    for (int64_t i = 0; i < last / 2; i++) {
      uint8_t low = nibbles[i] & 7, high = nibbles[i] >> 4 & 7, larger = low > high ? low : high;
      highest = larger > highest ? larger : highest;
    }
    for (int c = 0; c < 2 * CLASSES; c++) {
      int64_t level = row[1] - (c & (CLASSES - 1)) * CLASS_BITS;
      ranks[r].codes[c] = code_of(level > SILENT ? level : SILENT, spares && c >= CLASSES);
    }
    int64_t least = highest ? row[1] - highest * CLASS_BITS : row[1];
    least = highest && least < SILENT ? SILENT : least;
    lowest = least > lowest ? least : lowest;
    top = row[1] > top ? row[1] : top;
    begin_reading(&ranks[r].at, row, f);
  }
  for (int64_t start = 0; start < f.numel; start += OFFSETS) {
    int64_t end = f.numel - start < OFFSETS ? f.numel : start + OFFSETS;
    for (int64_t r = 0; r < n; r++) {
      reader at = ranks[r].at;
      for (; at.i < at.last && at.place < end; next_pick(&at, f)) {
        if (at.descends) continue;
        uint32_t offset = (uint32_t)(at.place - start);
        say(t, offset, ranks[r].codes[nibble_in(at.row + f.classes, at.i)]);
        uint8_t code = tops ? ((const uint8_t *)(at.row + f.seconds))[at.i] : 0;
        if (tops && code > t->tops[offset]) t->tops[offset] = code;
      }
      ranks[r].at = at;
    }
    found = union_in(t, start, found, united, said, tops);
  }
  for (int64_t r = 0; r < n; r++) {
    reader at = ranks[r].at;
    while (at.i < at.last) next_pick(&at, f);
    if (at.descends) return -1 - wrong_one(words, n, stride, f);
  }
  numbers[0] = found, numbers[1] = lowest, numbers[2] = top == TROUBLE;
  return thinned(found, limit, phase, united, said, tops, levels);
}

// The same of n messages that ls_tell has written, `stride` words each. spares: whether picks may be spare ones. tops: the
// largest code that any of them tells for each, missing where there are none. numbers: how many there were; the largest of
// all ranks' lowest levels; whether a value is not finite. ranks: n times as many bytes as ls_reader says. -1 - r where
// ls_tell cannot have written rank r's message.
EXPORT int64_t ls_meet(const int32_t *words, int64_t n, int64_t stride, const form *layout, int32_t spares,
                       int64_t limit, int64_t phase, table *t, speaker *ranks, int64_t *united, uint16_t *said,
                       uint8_t *tops, int32_t *levels, int64_t *numbers) {
  form f = *layout, frequent = f;
  frequent.planes = 0;
  if (!f.planes && tops)
    return meet(words, n, stride, frequent, spares, limit, phase, t, ranks, united, said, tops, levels, numbers);
  if (!f.planes)
    return meet(words, n, stride, frequent, spares, limit, phase, t, ranks, united, said, NULL, levels, numbers);
  return meet(words, n, stride, f, spares, limit, phase, t, ranks, united, said, tops, levels, numbers);
}

// Bytes for what is known of a rank while its message is read.
EXPORT int64_t ls_reader(void) { return (int64_t)sizeof(speaker); }

// The sums of n vectors, given at coordinates that ascend, below padding, `slots` words before their values: from zero in
// the order of the vectors, and then divided. -1 where some do not ascend.
EXPORT int64_t ls_add_pairs(const int32_t *const *places, int64_t slots, const int64_t *lengths, int64_t n,
                            int64_t padding, float divisor, table *t, int64_t *at, int64_t *united, float *sums) {
  int64_t found = 0;
  memset(at, 0, 8 * (size_t)n);
  for (int64_t start = 0; start < padding; start += OFFSETS) {
    int64_t end = start + OFFSETS < padding ? start + OFFSETS : padding;
    for (int64_t r = 0; r < n; r++) {
      int64_t i = at[r], place;
      for (; i < lengths[r] && (place = places[r][i]) >= start && place < end; i++) {
        t->of.sums[place - start] += float_of((uint32_t)places[r][slots + i]);
        name(t, (uint32_t)(place - start));
      }
      at[r] = i;
    }
    found = sums_in(t, start, found, united, sums, divisor);
  }
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = at[r]; i < lengths[r]; i++)
      if (places[r][i] != padding) return -1;
  return found;
}
