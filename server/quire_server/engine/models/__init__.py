"""Several models on one machine: which are in memory (`budget`), and their engines, which come and go (`model_set`)."""
