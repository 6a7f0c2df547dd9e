"""Scores without work: those that an earlier output has, and those of pairs that repeat another."""
