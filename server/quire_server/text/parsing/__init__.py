"""What a model's text means: its thoughts, its answer, its calls of tools.

Owns the formats in which models write them.
"""
