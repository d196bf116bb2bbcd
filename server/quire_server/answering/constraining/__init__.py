"""Constraints of a request on the form of its answer, combined into one grammar; the interface is `constraints`."""
