"""The report of a run as one HTML file: `data.py` gathers what is shown, `page.py` makes the file, `assets/` runs in the browser."""
