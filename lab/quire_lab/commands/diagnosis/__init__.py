"""Diagnosis of bad latencies from a server's metrics."""
