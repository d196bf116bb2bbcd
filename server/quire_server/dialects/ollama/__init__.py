"""Ollama's API, for editors and plugins that take nothing else."""
