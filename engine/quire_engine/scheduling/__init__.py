"""Plans every step: the sequences that compute, the tokens each gets, the KV blocks that hold them.

Standard library only, so that it can be tested and simulated without a model.
"""
