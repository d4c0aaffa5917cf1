"""The page that shows the ranks in a browser: what it keeps, what it asks for, and its files."""
