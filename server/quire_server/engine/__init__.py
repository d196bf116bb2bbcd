"""The engine as the server sees it: admission, streams, the child process and its recovery.

Knows no text and no HTTP.
"""
