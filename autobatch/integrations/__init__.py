"""Adapters that let the training loops of other libraries run exact micro-batches; each imports its own library."""
