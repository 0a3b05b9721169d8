"""Steps that optimize by themselves: `automatic_optimization = False`."""
