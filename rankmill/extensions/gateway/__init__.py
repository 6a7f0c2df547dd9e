"""The gateway: scores for services in any language, by the protocols that their clients speak."""
