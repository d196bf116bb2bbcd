"""Drafters: guesses of a sequence's next tokens, for steps that compute several of them at once."""
