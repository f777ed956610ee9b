"""Models of other people, tiny and with random weights, one file per family."""
