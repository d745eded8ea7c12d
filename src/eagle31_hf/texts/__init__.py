"""Rows of files and data sets as chats: for training, for benchmarks and for the doctor."""
