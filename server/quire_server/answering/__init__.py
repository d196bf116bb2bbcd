"""From a validated request to its reply: options, checks, the generation. It knows no dialect."""
