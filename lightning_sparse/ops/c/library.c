// Which instructions the processor has, and which sources the library was built from: what library.py asks.
#include "common.h"

// The highest of the levels of library.py.
EXPORT int ls_level(void) {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2")) return 0;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2")
             ? 2
             : 1;
#else
  return 0;
#endif
}

EXPORT const char *ls_source(void) { return SOURCE; }
