"""Progress displays of commands."""
