"""Our own loop: prefill, rounds of draft, verify, accept and commit, and what happens when memory runs out."""
