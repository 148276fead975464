"""What a run takes and how it fares: before it begins, and at each update."""
