"""Several ranks: what they exchange, and the gradient that they make together."""
