"""How a `generate` call enters, and which loop serves it."""
