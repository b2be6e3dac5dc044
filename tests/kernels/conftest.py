from tests.kernels.compiled import built as built
from tests.kernels.compiled import each_kernel as each_kernel
from tests.kernels.compiled import kernel as kernel
