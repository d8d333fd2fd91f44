"""The plots of a report."""
