from tests.kernels.compiled import built as built
from tests.kernels.compiled import each_kernel as each_kernel
from tests.kernels.compiled import kernel as kernel
from tests.kernels.interpreted import silent as silent

collect_ignore = ["compile_triton.py"]  # a program, which puts other modules in the package's place
