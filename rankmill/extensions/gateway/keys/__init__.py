"""API keys of the gateway, their limits, and the admission of requests."""
