"""What `quire NAME` runs, one command a file.

Each has `run(argv)` and returns the exit code.
"""
