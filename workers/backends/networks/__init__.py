"""Models of each kind as PyTorch modules with one interface: token ids in, logits out."""
