"""Output of commands at a terminal: progress, tables, complaints of one line."""
