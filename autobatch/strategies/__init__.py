"""Makes a step fit whose smallest micro-batch does not: which blocks are recomputed in the backward pass."""
