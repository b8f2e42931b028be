"""Several ranks: what they tell each other, and the gradient that they make together."""
