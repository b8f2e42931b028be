"""Training by a plan: the Runner, the transaction that a step is, the update, and what is reported of both."""
