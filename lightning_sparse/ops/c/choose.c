// Choosing among few, which a pass has found: the largest, and the largest of a stripe. The CPU formulations of
// ops/host.py for float32, equal bit for bit.
#include "common.h"

#define BINS 2048

// Which coordinates belong to a stripe: j with j mod ranks = turn. A multiple of ranks, times the inverse of its odd
// factor and turned by its even one, is small; other numbers are not.
typedef struct {
  uint32_t shift, inverse, even, limit;
} stripe;

static stripe stripe_of(int64_t turn, int64_t ranks) {
  uint32_t even = (uint32_t)__builtin_ctzll((uint64_t)ranks), odd = (uint32_t)ranks >> even, inverse = odd;
  for (int i = 0; i < 5; i++) inverse *= 2 - odd * inverse;
  return (stripe){(uint32_t)(ranks - turn), inverse, even, UINT32_MAX / (uint32_t)ranks};
}

INLINE uint32_t inside(stripe s, int32_t index) {
  uint32_t x = ((uint32_t)index + s.shift) * s.inverse;
  return (x >> s.even | x << ((32 - s.even) & 31)) <= s.limit;
}

// between: those of n numbers that lie from low to high, one after another; how many they are. They may take the place
// of m. of_stripe: the magnitudes of a stripe. pick: coordinates that reach `top`, and those of the stripe that reach
// `next`, which are marked as spare. All write a number behind what they find.
INLINE int64_t between(const uint32_t *m, int64_t n, uint32_t low, uint32_t high, uint32_t *found) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t x = m[i];
    found[count] = x;
    count += x - low <= high - low;
  }
  return count;
}

INLINE int64_t of_stripe(const int32_t *indices, const uint32_t *m, int64_t n, stripe s, uint32_t *found) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    found[count] = m[i];
    count += inside(s, indices[i]);
  }
  return count;
}

INLINE int64_t pick(const int32_t *indices, const uint32_t *m, int64_t n, uint32_t top, uint32_t next,
                    stripe s, int64_t *places, uint8_t *spare) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t first = m[i] >= top, second = (m[i] >= next) & (int32_t)inside(s, indices[i]);
    places[count] = indices[i], spare[count] = (uint8_t)!first;
    count += first | second;
  }
  return count;
}

// A histogram of n numbers from low to high, coarse: counts of bins from `low + (bin << shift)` on.
typedef struct {
  uint32_t low, last, counts[2][BINS];
  int shift;
} histogram;

INLINE void count(histogram *h, const uint32_t *m, int64_t n, uint32_t low, uint32_t high) {
  int width = high > low ? 32 - __builtin_clz(high - low) : 0;
  h->low = low, h->shift = width > 11 ? width - 11 : 0, h->last = (high - low) >> h->shift;
  memset(h->counts, 0, sizeof h->counts);
  int64_t i = 0;
  for (; i + 2 <= n; i += 2) {  // neighbours count apart, so that equal ones need not wait for each other
    h->counts[0][(m[i] - low) >> h->shift]++;
    h->counts[1][(m[i + 1] - low) >> h->shift]++;
  }
  for (; i < n; i++) h->counts[0][(m[i] - low) >> h->shift]++;
}

// The bin of the one that k of them reach; k becomes its rank in that bin.
INLINE uint32_t bin_of(const histogram *h, int64_t *k) {
  for (uint32_t bin = h->last;; bin--) {
    int64_t here = (int64_t)h->counts[0][bin] + h->counts[1][bin];
    if (!bin || here >= *k) return bin;
    *k -= here;
  }
}

INLINE void bounds_of(const uint32_t *m, int64_t n, uint32_t *low, uint32_t *high) {
  uint32_t least = UINT32_MAX, largest = 0;
  for (int64_t i = 0; i < n; i++) {
    least = m[i] < least ? m[i] : least;
    largest = m[i] > largest ? m[i] : largest;
  }
  *low = least, *high = largest;
}

// Of n bit patterns, the one that k of them reach, from a histogram of them; spare has room for n + 15. Order of bits
// is order of magnitudes.
INLINE uint32_t kth_of(const histogram *first, const uint32_t *m, int64_t n, int64_t k, uint32_t *spare) {
  histogram finer;
  const histogram *h = first;
  for (;;) {
    uint32_t low = h->low + (bin_of(h, &k) << h->shift);
    if (!h->shift) return low;
    uint32_t high = low + (1u << h->shift) - 1;
    n = between(m, n, low, high, spare), m = spare;
    if (n == 1) return m[0];
    bounds_of(m, n, &low, &high);
    if (low == high) return low;
    count(&finer, m, n, low, high), h = &finer;
  }
}

// How many there are above a number, and with it.
INLINE void above_and_at(const uint32_t *m, int64_t n, uint32_t x, int64_t *above, int64_t *at) {
  int64_t larger = 0, equal = 0;
  for (int64_t i = 0; i < n; i++) larger += m[i] > x, equal += m[i] == x;
  *above = larger, *at = equal;
}

// Of n coordinates, ascending, and their magnitudes: the `share` largest, and of the others with j mod ranks = turn the
// `wanted` largest, which are marked as spare; all in order. Of equal ones, the first. Returns how many they are; 0,
// where there are not so many others. reached: a magnitude that at least `more` of all reach, and not many more. places
// and spare have room for share + wanted + 16, room for 2 n + 32.
EXPORT int64_t ls_largest(const int32_t *indices, const float *magnitudes, int64_t n, int64_t share, int64_t wanted,
                          int64_t turn, int64_t ranks, int64_t more, int64_t *places, uint8_t *spare, uint32_t *room,
                          float *reached) {
  const uint32_t *m = (const uint32_t *)magnitudes;
  histogram all, mine;
  uint32_t low, high, top = UINT32_MAX, next = UINT32_MAX, *others = room + n + 16;
  int64_t larger = 0, equal = 0, own, rank = more, found = 0, ties, also = 0, above, at;
  const stripe s = stripe_of(turn, ranks);
  bounds_of(m, n, &low, &high), count(&all, m, n, low, high);
  low = all.low + (bin_of(&all, &rank) << all.shift);
  *reached = float_of(low);
  if (share) top = kth_of(&all, m, n, share, room), above_and_at(m, n, top, &larger, &equal);
  ties = share - larger;
  if (wanted) {
    own = of_stripe(indices, m, n, s, others);
    if (own < wanted) return 0;
    // Of the stripe, those that are among the first come first.
    above_and_at(others, own, top, &above, &at);
    int64_t taken = above;
    if (ties == equal)
      taken += at;
    else
      for (int64_t i = 0, left = ties; i < n && left; i++)
        if (m[i] == top) left--, taken += inside(s, indices[i]);
    if (own - taken < wanted) return 0;
    bounds_of(others, own, &low, &high), count(&mine, others, own, low, high);
    next = kth_of(&mine, others, own, taken + wanted, room);
    above_and_at(others, own, next, &above, &at);
    also = taken + wanted - above;
    if (ties == equal && also == at) return pick(indices, m, n, top, next, s, places, spare);
    if (next == top) also -= taken - above;
  } else if (ties == equal) {
    return pick(indices, m, n, top, UINT32_MAX, s, places, spare);
  }
  for (int64_t i = 0; i < n; i++) {  // of equal ones, the first
    int tie = m[i] == top && ties > 0, first = (m[i] > top) | tie;
    int other = !first && wanted && inside(s, indices[i]), last = other && m[i] == next && also > 0;
    int second = other & ((m[i] > next) | last);
    ties -= tie, also -= last;
    places[found] = indices[i], spare[found] = (uint8_t)second;
    found += first | second;
  }
  return found;
}
