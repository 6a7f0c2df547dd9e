"""Experiments and tuning: settings tried in turn in fresh workers, and what is learnt of it."""
