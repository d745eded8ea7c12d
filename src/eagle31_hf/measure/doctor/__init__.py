"""Is this pair sound? Preflight, acceptance, drift and losslessness on the user's own set-up."""
