"""A plan, and what became of it, rendered for people: text and HTML."""
