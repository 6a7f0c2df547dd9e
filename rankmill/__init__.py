"""User interfaces: commands, the embedded cluster, the live page, tuning."""
