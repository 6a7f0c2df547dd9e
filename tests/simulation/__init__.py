"""Whole clusters on one thread, in virtual time: real code, a seeded order of events, faults, a checker."""
