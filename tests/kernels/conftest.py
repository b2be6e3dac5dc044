from tests.kernels.compiled import built as built
from tests.kernels.compiled import kernel as kernel
