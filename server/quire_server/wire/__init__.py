"""What clients send and get, as pydantic models, one file a dialect.

Imports nothing of the server but its errors and the neutral request that each dialect makes.
"""
