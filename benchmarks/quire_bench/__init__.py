"""`quire bench`: load on one or more servers, what came back, and what the machine could have done."""
