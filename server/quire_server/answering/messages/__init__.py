"""The Messages dialect's half of answering: its content blocks and events, its renderer."""
