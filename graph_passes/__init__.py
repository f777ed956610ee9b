"""FX passes that order collectives around compute. Knows graphs and marks, not the wrapper."""
