"""Facts on batching and paged memory, checked against a live server: expected beside got."""
