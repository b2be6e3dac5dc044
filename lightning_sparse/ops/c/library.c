// Which instructions the library uses, and which sources it was built from: what library.py asks when it loads it.
#include "common.h"

int instructions = -1;

// Choose instructions, at most those of a level; the level that is used. Called once, before anything else.
EXPORT int ls_choose(int most) {
  instructions = 0;
#ifdef X86
  __builtin_cpu_init();
  if (most > 0 && __builtin_cpu_supports("avx2")) instructions = 1;
  if (most > 1 && instructions && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
    instructions = 2;
#endif
  (void)most;
  return instructions;
}

EXPORT const char *ls_source(void) { return SOURCE; }
