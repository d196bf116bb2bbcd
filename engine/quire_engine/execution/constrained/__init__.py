"""What a request's output must be, told token by token: grammars, and how long it may think. Must not know: queues,
blocks.
"""
