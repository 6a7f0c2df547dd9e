"""What people and other services touch: commands, embedded cluster, page, tuning."""
