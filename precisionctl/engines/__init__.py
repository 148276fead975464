"""What each inference engine accepts, one file for each, as rules of the kinds in `rules/`."""
