"""From a validated request to its reply: options, checks, the generation, the JSON.

Knows no path and no wire model.
"""
