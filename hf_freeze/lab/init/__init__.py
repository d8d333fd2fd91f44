"""A recipe for a beginning: from a few answers to a commented file that `hf-freeze run` takes."""
