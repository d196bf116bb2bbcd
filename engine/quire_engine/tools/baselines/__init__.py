"""What continuous batching is compared with: processes that answer fixed batches, each as a command of its own."""
