"""An output in parts: files of so many rows each, in one folder."""
