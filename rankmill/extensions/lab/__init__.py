"""What measures models and machines."""
