"""The wire of Anthropic's Messages API: a request's content blocks, tools and options, the reply, the events."""
