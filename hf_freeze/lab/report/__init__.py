"""Reports: what finished runs show, as tables, plots and a page."""
