"""From tokens to scores: which rows are batched, when each batch runs, where its scores go."""
