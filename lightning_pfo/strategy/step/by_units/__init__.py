"""The model unit by unit: all ranks run the same code, and each unit where it is held; every rank gets what it returns.

So hooks call the model (`calls`), and so evaluation steps run that cannot be divided into stages, as one that generates
text, or decides by what the model has computed (`endings`; `on_stages` runs them). Forward only: nothing is differentiated, and ranks wait
for each other at each unit.
"""
