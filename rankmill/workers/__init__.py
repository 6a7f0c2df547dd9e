"""Workers, which take chunks of pairs off the queue and score them."""
