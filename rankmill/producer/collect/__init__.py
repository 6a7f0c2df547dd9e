"""From pairs to chunks, and from results to scored tables in order."""
