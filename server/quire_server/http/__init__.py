"""HTTP: the listener and its connections, authentication and limits, bodies, event streams, the API document.

Has no route, no text and no engine.
"""
