"""The page /learn: steps and blocks of a running server as they happen, and exercises that are graded by them."""
