"""The wire models of /v1/responses: what goes in, item by item, what comes out, event by event."""
