"""Command line processes around the engine, which use JSON; nothing else in the laboratory loads torch."""
