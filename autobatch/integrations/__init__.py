"""Lets the training loops of other libraries run exact micro-batches; each adapter imports only its own library."""
