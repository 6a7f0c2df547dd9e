"""Formats of files: a module for each, with its reader and its writer; `table` names them all."""
