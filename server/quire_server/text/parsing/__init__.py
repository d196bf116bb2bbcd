"""Parses a model's text into reasoning, answer and tool calls.

Owns the formats in which models write them.
"""
