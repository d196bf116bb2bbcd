"""Routes outside of the dialects, one family of endpoints per file."""
