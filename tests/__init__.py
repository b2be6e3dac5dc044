"""The tests, with one thread of computation for each process, and Triton's interpreter where there is no GPU."""

import os
from pathlib import Path

# Before torch and numpy are imported; processes that tests start inherit it. Tests and their ranks fill the cores by
# themselves: threads beside them would only take these away from each other, and the order of sums depend on them.
os.environ["OMP_NUM_THREADS"] = "1"

# Before triton is imported, which torch does by and by: how its kernels are defined is decided then.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):  # the latter under WSL
    os.environ["TRITON_INTERPRET"] = "1"
