"""The gradient of a whole batch from micro-batches: pieces, what each one counts for, and the transaction."""
