"""What a drafter learns from: rows, texts the target writes, token ids with a loss mask, packed rows."""
