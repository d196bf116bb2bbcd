"""The sub-commands of `quire` that simulate, plan, replay and diagnose, one per file.

Each has `run(argv)` and returns the exit code.
"""
