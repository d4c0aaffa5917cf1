"""One file for each trainer that uses the packages."""
