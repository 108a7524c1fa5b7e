"""Models of ironhorse in lm-evaluation-harness (`pip install lm_eval`).

    python -m ironhorse.lm_eval --model ironhorse --model_args pretrained=FOLDER --tasks hellaswag

is the harness's own command, which knows the model `ironhorse` besides its others. In Python, importing this module is
what registers it: `lm_eval.simple_evaluate(model="ironhorse", model_args={"pretrained": FOLDER}, tasks=[...])`.
"""

from __future__ import annotations

from ..errors import NotAvailableError

try:
    from ._model import IronhorseLM
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] not in ("lm_eval", "tqdm"):
        raise
    raise NotAvailableError("ironhorse.lm_eval needs lm-evaluation-harness: pip install lm_eval") from error

__all__ = ["IronhorseLM"]
