"""Everything that a training step may change, and how each kind of it is remembered and put back."""
