"""Lets several ranks train together: exchanges what each has to know, and sums their gradients."""
