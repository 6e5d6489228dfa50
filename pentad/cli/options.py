"""Options that several commands take."""

from __future__ import annotations

from typing import Annotated

from typer import Option

AdapterOption = Annotated[
    str | None, Option("--adapter", help="PEFT folder, unmerged beside the model's weights.")
]
DeviceOption = Annotated[str, Option(help="cpu, cuda or auto.")]
Figures = Annotated[bool, Option("--json", help="Print the figures as JSON.")]
Findings = Annotated[bool, Option("--json", help="Print the findings as JSON.")]
