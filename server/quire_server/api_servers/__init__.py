"""API servers beside a main process: they accept on one port and do the text of requests; the main process has the
engine and the queue, and answers every other request.

Promises: an API server that ends costs its own connections alone and is started again; limits, tenants and metrics are
those of the whole server.
"""
