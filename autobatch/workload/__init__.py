"""The user's training step as something that runs at any size: batches, losses, and the state around them."""
