"""The run with fake tensors and a fake GPU: what it answers to the user's code, and what is seen
of it."""
