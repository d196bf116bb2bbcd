"""Constraints on a request's output, token by token: grammars and thinking budgets. Must not know: queues,
blocks.
"""
