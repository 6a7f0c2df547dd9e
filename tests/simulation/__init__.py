"""Whole clusters on one thread, in virtual time: the real code, a seeded order of events, faults, a checker."""
