"""A pytest plugin under which the C++ kernels are built with AddressSanitizer and UBSan.

Promises: every library that the tests load is checked. Must not know: which tests run.
"""

from __future__ import annotations

from functools import partial

import torch

from quire_kernels.cpu import attention, context, library

CHECKS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1", "-O1")

library.FLAGS = (*library.FLAGS, *CHECKS)
# Mapped memory has no borders that could be watched; allocated memory has.
context.Arena.allocate = lambda _, num_bytes: torch.empty(num_bytes, dtype=torch.uint8)
attention.map_huge = lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8)
# One file of vector instructions takes the compiler minutes with both checks, more on a busy machine.
library._build = partial(library._build, timeout=3600.0)
