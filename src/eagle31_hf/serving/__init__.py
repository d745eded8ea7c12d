"""Many clients on one card: requests join and leave a running batch; an HTTP server that speaks OpenAI's API."""
