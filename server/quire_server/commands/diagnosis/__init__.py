"""From what a server's metrics say to the causes of bad latencies."""
