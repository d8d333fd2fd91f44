"""What a grid can train, one file a task."""
