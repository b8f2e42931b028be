"""From a model and a target batch to a plan: trials run for real, sizes searched, a plan made."""
