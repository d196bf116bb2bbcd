"""The programs that serve: one model, several, a node, a batch; their start, readiness and end."""
