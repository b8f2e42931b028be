"""The user's step: what it is called with, what it returns, and what its losses are means over."""
