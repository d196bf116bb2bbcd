"""What a request asks of its answer's form, as one grammar; `constraints` is what the rest uses."""
