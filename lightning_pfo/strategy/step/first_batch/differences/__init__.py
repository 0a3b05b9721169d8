"""What differs between microbatches and their batch in one piece, of two runs: losses, other numbers, slopes."""
