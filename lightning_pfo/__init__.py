"""Pipeline parallelism for PyTorch Lightning that trains with the least energy.

Importing this package makes `Trainer(strategy="pfo_pipeline")` known to Lightning. It stays cheap: torch and Lightning
are imported by those who use them, so the planner works without either.
"""

from lightning_pfo.registration import register_when_lightning_is_imported

__version__ = "0.1.0"

register_when_lightning_is_imported()
