"""Who computes how many tokens in each step, and which blocks hold them: requests in, plans out.

Standard library only, so that it can be tested and simulated without a model.
"""
