"""`python -m quire_engine.tools.prover`: checks a GPU's kernels and optional paths in processes that may die of it."""
