"""The Responses dialect's half of answering: its output items and events, its renderer, the store of past responses."""
