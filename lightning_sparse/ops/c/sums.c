// Sums and extremes of a vector: the CPU formulations of host_sums.py for float32, equal bit for bit. Each function exists
// once, as inline code, and is compiled as in dense.c.
#include "lanes.h"

INLINE void sums(const float *x, int64_t n, int64_t kind, double level, float bound, double *out) {
  lanes s;
  begin_sums(&s, kind, n, level, bits_of(bound));
  add_to(&s, 0, x, x + ROWS * LANES, n);
  end_sums(&s, out);
}

#define VARIANTS(name, target)                                                                                        \
  target static void sums_##name(const float *x, int64_t n, int64_t kind, double level, float bound, double *out) { \
    sums(x, n, kind, level, bound, out);                                                                             \
  }

VARIANTS(portable, )
#ifdef X86
VARIANTS(avx2, AVX2)
VARIANTS(avx512, AVX512)
#endif

// out: see end_sums. Counted is what reaches the bound, which is not negative.
EXPORT void ls_sums(const float *x, int64_t n, int64_t kind, double level, float bound, double *out) {
  PICK(sums)(x, n, kind, level, bound, out);
}
