"""Before torch is loaded: one thread for each process of the tests. Ranks compute beside one another on few cores,
and threads that spin at OpenMP's barriers take the cores from them."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
