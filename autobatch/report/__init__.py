"""Renders a plan, and what became of it, for people: text, charts and HTML."""
