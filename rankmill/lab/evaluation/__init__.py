"""How good rankings are, by relevance judgements."""
