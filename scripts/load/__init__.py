"""Load on a running service: conversations, ways to send them, and what is reported."""
