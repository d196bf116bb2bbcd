"""What the scheduler remembers of its steps and requests: it watches and decides nothing."""
