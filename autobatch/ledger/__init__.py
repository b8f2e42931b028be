"""What was learnt about memory, kept from one start to the next."""
