"""Bytes in and out: the listener, what guards it, bodies, event streams, the API's document.

Knows no route, no text and no engine.
"""
