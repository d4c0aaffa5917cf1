"""One's own text: the files, their tokens, and the cache that holds them."""
