"""The model unit by unit: all ranks run the same code, and each unit where it is held; every rank gets what it returns.

So hooks call the model (`calls`; what others are told of a call is in `changes`), and so evaluations run that cannot be
divided into stages, as those that generate text, or decide by what the model has computed (`on_stages` runs them, and
`endings` is where ranks meet again). Forward only: nothing is differentiated, and ranks wait for each other.
`whole_parameters` gives all ranks the values of a module for a while, for hooks, and for units that call it.
"""
