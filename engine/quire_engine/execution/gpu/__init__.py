"""Steps on a GPU that the host does not wait for: packed input, tables that stay there, graphs, launch and collect.
Must not know: queues, requests.
"""
