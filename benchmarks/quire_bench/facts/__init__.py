"""What is known of batching and paged memory, checked against a live server: expected beside got."""
