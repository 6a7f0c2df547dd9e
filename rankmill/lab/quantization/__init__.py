"""``rankmill quantize``: a model directory that workers compute in 8 bits with little loss."""
