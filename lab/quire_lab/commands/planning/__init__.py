"""The output of the commands that simulate and plan."""
