from tests.ops.compiled import built as built
from tests.ops.compiled import each_kernel as each_kernel
from tests.ops.compiled import kernel as kernel
from tests.ops.interpreted import dirty as dirty
from tests.ops.interpreted import silent as silent

collect_ignore = ["compile_triton.py"]  # a program, which puts other modules in the package's place
