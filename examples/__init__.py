"""Examples of use, pairs to score, and a demo model with the scripts that train and measure it."""
