"""Who may use the gateway, and how much: API keys, their limits, and the place where requests are let in."""
