"""A plan carried out: streamed through workers and ranks, journalled, and renamed when it is whole."""
