"""The tests, with one thread of computation for each process."""

import os

# Before torch and numpy are imported; processes that tests start inherit it. Tests and their ranks fill the cores by
# themselves: threads beside them would only take these away from each other, and the order of sums depend on them.
os.environ["OMP_NUM_THREADS"] = "1"
