"""The registry of models at the gateway, for those whose keys may manage models."""
