"""Cards, the Hub, code for repositories, and exports for other engines."""
