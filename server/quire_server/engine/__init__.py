"""The server's side of the engine: admission control, output streams, the child process and its recovery.

Has no text and no HTTP.
"""
