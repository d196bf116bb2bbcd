"""Embeddings, and similarity scores of embeddings."""
