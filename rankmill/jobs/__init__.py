"""What producers and workers share: the contract, the protocol and the runtime. It never imports torch."""
