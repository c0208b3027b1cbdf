"""The engine: requests, sampling, the jitted step and what runs it."""
