"""Batches: files of requests that are answered in time, beside live requests, and survive the process.

Must not know: HTTP, routes, the engine.
"""
