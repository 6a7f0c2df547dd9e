"""The commands of the core, and what commands share."""
