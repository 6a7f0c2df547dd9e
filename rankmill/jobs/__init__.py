"""The contract, the protocol and the runtime, which producers and workers share.

This package never imports torch.
"""
