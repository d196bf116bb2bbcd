"""The path from a validated request to its reply: options, checks, generation. Independent of any dialect."""
