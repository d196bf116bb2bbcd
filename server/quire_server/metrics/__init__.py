"""The metrics: their names and meanings, how they are kept, and the history for the dashboard.

Has no route, and of the engine only its statistics.
"""
