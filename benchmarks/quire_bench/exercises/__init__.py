"""The exercises of the lessons on continuous batching, done by a live server: expected beside got."""
