"""The same steps as graphs of fixed shape."""
