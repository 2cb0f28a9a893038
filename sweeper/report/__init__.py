"""What a sweep shows its reader: tables of cells, curves of runs."""
