"""The sub-commands of `quire`, one per file.

Each has `run(argv)` and returns the exit code.
"""
