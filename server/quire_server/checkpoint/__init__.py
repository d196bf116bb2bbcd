"""Which directory a model's name stands for, and what is wrong with one that cannot be served.

Knows no HTTP, no text and no engine.
"""
