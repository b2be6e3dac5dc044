"""Operations in Triton for CUDA."""
