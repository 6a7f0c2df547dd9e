"""What scores or measures without a queue."""
