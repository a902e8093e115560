"""What is wrong with a workflow, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from offset_runtime.errors import WorkflowError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to repair: `where` names file and line, `text` what was found and what to do."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def raise_findings(findings: Iterable[Finding]) -> None:
    """Raise one `WorkflowError` with a line for each finding; nothing where there is none."""
    lines = list(dict.fromkeys(str(finding) for finding in findings))
    if lines:
        raise WorkflowError("\n".join(lines))
