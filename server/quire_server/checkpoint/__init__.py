"""Finds a model's checkpoint directory by name, and explains why one cannot be served.

Has no HTTP, no text and no engine.
"""
