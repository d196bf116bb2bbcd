"""The infilling of llama.cpp's server, for editors."""
