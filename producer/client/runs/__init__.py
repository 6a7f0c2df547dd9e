"""What a caller has of its runs: scores, reasons, progress, statistics."""
