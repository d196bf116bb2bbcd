"""Static batching as a baseline for continuous batching; each baseline is a process of its own."""
