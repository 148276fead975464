"""What each inference engine accepts, as rules."""
