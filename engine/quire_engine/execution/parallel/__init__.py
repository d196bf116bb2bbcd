"""Ranks: several processes that compute one model, each some columns of every product and some heads.

Rank 0 is the engine process, which plans and samples; the others are its children and do what it tells them. Every rank
has the same tables of blocks; its pool holds its own heads' keys and values.
"""
