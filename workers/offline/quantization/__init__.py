"""Making models that workers compute in 8 bits; run by ``rankmill quantize`` as a process."""
