"""Exercises on continuous batching, done by a live server: expected beside got."""
