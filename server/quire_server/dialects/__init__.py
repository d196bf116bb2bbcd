"""What clients send and get: one folder a dialect, with its wire models, its renderer and its routes."""
