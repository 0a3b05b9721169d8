"""The vocabulary everybody shares; standard library only."""
