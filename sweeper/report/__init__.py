"""What a sweep shows its reader: the table of cells, the report as a page, curves of runs."""
