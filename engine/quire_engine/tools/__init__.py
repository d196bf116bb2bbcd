"""Command line processes around the engine for planning, measuring, packing and checking; most of them use JSON.

The server's own processes never import them.
"""
