"""Runs the user's code with fake tensors and a fake GPU, and records what it does."""
