"""lpbnn: turn any PyTorch network into one that knows what it does not know."""
