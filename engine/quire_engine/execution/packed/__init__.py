"""Packed weights as one block of memory, an image: it outlives the engine process, and a file keeps it.

`image` is the memory, `header` says what lies where in it, `folder` has the files, `reading` and `writing` are of one.
"""
