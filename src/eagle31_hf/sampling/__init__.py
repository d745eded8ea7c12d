"""Lossless acceptance and the scores it reads: pure functions on tensors."""
