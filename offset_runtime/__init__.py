"""Offset Runtime: one shared base model, a domain offset for each agent call.

Importing this package loads neither torch nor LangChain; they load when a model or an agent is made.
"""

import logging

from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.cache import CacheFigures
from offset_runtime.constrain import Constraint
from offset_runtime.engine import EngineSettings
from offset_runtime.errors import OffsetError
from offset_runtime.models import ModelSpec
from offset_runtime.offset import DomainOffset
from offset_runtime.request import Completion, Delta, Request, Reuse
from offset_runtime.runtime import OffsetRuntime, Score
from offset_runtime.sampling import SamplingParams
from offset_runtime.state_folder import StateFolder
from offset_runtime.store import OffsetStore

__all__ = [
    "CacheFigures",
    "Completion",
    "Constraint",
    "Delta",
    "DomainOffset",
    "EngineSettings",
    "LlamaCppOptions",
    "ModelSpec",
    "OffsetError",
    "OffsetRuntime",
    "OffsetStore",
    "Request",
    "Reuse",
    "SamplingParams",
    "Score",
    "StateFolder",
]

__version__ = "0.1.0"

# What is logged is shown where the application asks for it, and nowhere else.
logging.getLogger(__name__).addHandler(logging.NullHandler())
