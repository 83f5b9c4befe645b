import os

# Before torch is loaded anywhere: two test processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
