import os

# Before torch is loaded anywhere: two test processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before Triton is loaded anywhere: its kernels run on the CPU here.
os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import settings

# The same examples every time, and no clock in a test.
settings.register_profile("fedbranch", derandomize=True, deadline=None, database=None)
settings.load_profile("fedbranch")
