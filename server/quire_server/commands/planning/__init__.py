"""What the commands that simulate and plan print and write."""
