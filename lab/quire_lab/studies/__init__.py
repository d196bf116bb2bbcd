"""Studies of papers: what was published or follows from theory, beside what the scheduler that serves does."""
