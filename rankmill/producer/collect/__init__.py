"""Cuts pairs into chunks, and turns results into scored tables in input order."""
