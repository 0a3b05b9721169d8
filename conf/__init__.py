"""Hydra's groups; as `pkg://lightning_pfo.conf` they are on the search path of any script that asks for them."""
