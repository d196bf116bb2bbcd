"""Connections to other engines and to memory that outlives one: proof of identity, and KV blocks on their way."""
