"""Make a model smaller: from texts and a budget alone."""
