"""Operations in C for CPUs, their library and its calls by ctypes."""
