"""The APIs of the server: one folder per dialect, with its wire models, its renderer and its routes."""
