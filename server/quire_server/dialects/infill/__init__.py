"""Infilling (fill in the middle) as in llama.cpp's server, for editors."""
