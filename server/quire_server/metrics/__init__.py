"""What operators live by: the metrics, what each of them means, how they are kept.

Knows no route and no engine but its statistics.
"""
