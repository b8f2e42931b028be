"""Asks cuDNN how much workspace the convolutions of a traced step take on a card that need not be there."""
