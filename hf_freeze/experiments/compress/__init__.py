"""`hf-freeze compress`: from a trained model to a variant within a budget of bytes and milliseconds."""
