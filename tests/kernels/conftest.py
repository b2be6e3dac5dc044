from tests.kernels.compiled import built as built
from tests.kernels.compiled import each_kernel as each_kernel
from tests.kernels.compiled import kernel as kernel
from tests.kernels.interpreted import silent as silent
