"""Lets several ranks train together: one exchange of messages, one sum of gradients, all steps done or none."""
