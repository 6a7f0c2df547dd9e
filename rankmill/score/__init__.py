"""What score-file is asked for, and what it reports."""
