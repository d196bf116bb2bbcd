"""Routes that belong to no dialect, one family of endpoints a file."""
