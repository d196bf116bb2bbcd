"""Embeddings, and scores that are made of them."""
