"""From notebooks to pages: run, reuse, pages, index, plots."""
