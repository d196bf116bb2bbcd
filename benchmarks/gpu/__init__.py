"""`make gpu-bench`: what a GPU's kernels, steps and engine reach of the GPU's own limits."""
