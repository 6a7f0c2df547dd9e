"""What producers and workers share: the contract, the protocol and the runtime. This package never imports
torch.
"""
