// Which instructions the processor has, and which sources the library was built from: what library.py asks.
#include "common.h"

#ifdef __x86_64__
#include <cpuid.h>

// Whether the system keeps these registers of a process: bits 1 and 2 those of AVX, 5 to 7 those of AVX-512.
static int keeps(unsigned bits) {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & bits) == bits;
}
#endif

// The highest of the levels of library.py. Not every compiler brings what __builtin_cpu_supports needs.
EXPORT int ls_level(void) {
#ifdef __x86_64__
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_POPCNT) || !keeps(0x6)) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
  const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL | bit_BMI | bit_BMI2;
  return (b & wide) == wide && keeps(0xe6) ? 2 : 1;
#else
  return 0;
#endif
}

EXPORT const char *ls_source(void) { return SOURCE; }
