"""The plain data that crosses from one part to another: requests, batches, outputs, blocks, limits, configuration.

Scheduling, execution, the engine process and the server import it; it imports none of them.
"""
