"""What producers and workers share: the contract and the protocol. Light: never torch."""
