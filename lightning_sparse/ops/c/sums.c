// Sums and extremes of a vector: those of host_sums.py for float32, equal bit for bit.
#include "lanes.h"

// out: see end_sums. Counted is what reaches the bound, which is not negative.
EXPORT void ls_sums(const float *x, int64_t n, int64_t kind, double level, float bound, double *out) {
  lanes s;
  begin_sums(&s, kind, n, level, bits_of(bound));
  add_to(&s, 0, x, x + ROWS * LANES, n);
  end_sums(&s, out);
}
