"""Files: what is read, what is written, and what an interrupted run leaves."""
