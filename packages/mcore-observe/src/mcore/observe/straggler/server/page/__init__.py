"""The page that shows the ranks in a browser: its files, its history, and its data as JSON."""
