"""The command line: ``offset-runtime``. Each command reads its options and calls the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

import offset_runtime
from offset_runtime.errors import DocumentError, InvalidRequestError, OffsetFileError, nearest_hint
from offset_runtime.model_options import (
    BackendOption,
    DeviceOption,
    LlamaCppOption,
    ModelOption,
    loaded,
    model_spec,
    training_spec,
)
from offset_runtime.store import OffsetStore
from offset_runtime.terminal import (
    EXIT_USER_ERROR,
    CommandGroup,
    messages,
    output,
    print_error,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    from offset_runtime.backends.base import Backend
    from offset_runtime.documents import Documents
    from offset_runtime.offset import DomainOffset
    from offset_runtime.training import TrainingSettings


class _Commands(CommandGroup):
    lazy: ClassVar[Mapping[str, tuple[str, str]]] = {
        "run": (
            "offset_runtime.graphs.commands:run",
            "Run a workflow file: agents in their domains, on one base model.",
        ),
        "graph": ("offset_runtime.graphs.commands:graph_app", "Check and draw workflow files."),
        "bench": ("offset_runtime.bench.command:bench", "Measure on your own model what domains cost."),
    }


app = typer.Typer(
    cls=_Commands,
    name="offset-runtime",
    help="One shared base model, a domain offset for each agent.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line. Exit codes: 0, 1 internal error, 2 an error of the user's, 130 interrupted."""
    app(prog_name="offset-runtime")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offset-runtime {offset_runtime.__version__}")
        raise typer.Exit


StoreOption = Annotated[Path, typer.Option("--store", "-s", metavar="FOLDER", help="Folder of the offset files.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """One shared base model, a domain offset for each agent."""


@app.command()
def train(
    domain: Annotated[str, typer.Argument(metavar="DOMAIN", help="Name of the domain.", show_default=False)],
    docs: Annotated[
        list[Path], typer.Option("--docs", metavar="PATH", help="A folder, .jsonl or text file; may be repeated.")
    ],
    model: ModelOption,
    store: StoreOption = Path("offsets"),
    validation: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Documents for early stopping. Default: up to 16 of --docs."),
    ] = None,
    recipe: Annotated[
        str, typer.Option(metavar="NAME", help="default, or paper: raw text, K 1, no retention.")
    ] = "default",
    prompt_format: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="raw, bos or chat.", show_default="chat")
    ] = None,
    anchor: Annotated[
        str | None, typer.Option(metavar="ANCHOR", help="sequence or turn.", show_default="turn in chat, else sequence")
    ] = None,
    positions: Annotated[int | None, typer.Option("--positions", "-k", help="K.", show_default="8")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens a document is cut at.", show_default="64")] = None,
    steps: Annotated[int | None, typer.Option(help="The most steps.", show_default="36")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Documents a step.", show_default="8")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Adam's.", show_default="0.01")] = None,
    retention_weight: Annotated[
        float | None, typer.Option(help="Weight of staying close to the base elsewhere; 0: none.", show_default="1.5")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", show_default="0")] = None,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the offset of a domain on about 100 documents. Ctrl-C keeps the best so far.

    [bold]Example[/bold]: offset-runtime train legal -m smollm2-135m --docs contracts/ --docs letters.jsonl
    """
    from offset_runtime.documents import read_documents
    from offset_runtime.training import held_back_count

    changes = {
        "prompt_format": prompt_format,
        "anchor": anchor,
        "positions": positions,
        "max_tokens": max_tokens,
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "retention_weight": retention_weight,
        "seed": seed,
    }
    spec = training_spec(model, backend, device)
    target = OffsetStore(store)
    target.check_writable(domain)  # refused before the work, not after it
    documents = read_documents(docs)
    held_back = read_documents(validation) if validation else None
    trained_on = len(documents.items) - (0 if held_back else held_back_count(len(documents.items)))
    settings = _training_settings(recipe, trained_on, {k: v for k, v in changes.items() if v is not None})
    with loaded(spec) as base:
        offset = _train(base, documents, domain, settings, held_back)
    _print_trained(offset, _kept(target, offset), as_json)


@app.command("eval")
def evaluate(
    docs: Annotated[
        list[str],
        typer.Option("--docs", metavar="DOMAIN=PATH", help="Held-out documents of a domain; may be repeated."),
    ],
    model: ModelOption,
    store: StoreOption = Path("offsets"),
    max_tokens: Annotated[int, typer.Option(min=4, help="Tokens a document is cut at.")] = 64,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a .png or .svg.")] = None,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    llama_cpp: LlamaCppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure offsets on held-out documents: gain, retention, and the wrong-domain control.

    [bold]Example[/bold]: offset-runtime eval -m smollm2-135m --docs legal=test.jsonl --docs code=code/ --plot gain.png
    """
    from offset_runtime import evaluation, report

    spec = model_spec(model, backend, device, llama_cpp)
    target = report.check_plot_path(plot) if plot else None
    documents = _test_documents(docs)
    offsets = _offsets(store, list(documents), others=True)
    with loaded(spec) as base, progress_bar("evaluating") as bar:
        found = evaluation.evaluate(
            base, offsets, documents, max_tokens=max_tokens, progress=lambda at: bar(at.stage, at.done, at.total)
        )
    print_json(found.as_json()) if as_json else output().print(report.tables(found))
    if target:
        report.plot(found, target)


@app.command()
def score(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A text, .jsonl or folder.", show_default=False)],
    model: ModelOption,
    domain: Annotated[str, typer.Option("--domain", "-d", metavar="DOMAIN|all", help="Under which domain.")] = "all",
    store: StoreOption = Path("offsets"),
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    llama_cpp: LlamaCppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Log-likelihood of a text under a domain, or under all of them, beside the plain base model.

    [bold]Example[/bold]: offset-runtime score -m smollm2-135m --domain all letter.txt
    """
    from offset_runtime.ranking import rank_domains, ranking_table
    from offset_runtime.runtime import OffsetRuntime

    spec = model_spec(model, backend, device, llama_cpp)
    texts = _texts(file)
    offsets = _offsets(store, [] if domain == "all" else [domain], others=domain == "all")
    with loaded(spec) as base, OffsetRuntime(base) as runtime:
        ranked = rank_domains(runtime, texts, list(offsets.values()))
    if as_json:
        print_json({"backend": base.name, "scores": [score.as_json() for score in ranked]})
    else:
        output().print(ranking_table(ranked, f"{model} on {base.name}"))


@app.command("list")
def list_offsets(store: StoreOption = Path("offsets"), as_json: JsonOption = False) -> None:
    """List the offsets of a store.

    [bold]Example[/bold]: offset-runtime list --store offsets
    """
    from offset_runtime.catalogue import list_table, read_store, summary

    entries = read_store(OffsetStore(store))
    if as_json:
        usable = [summary(entry.offset, entry.path) for entry in entries if entry.offset]
        print_json({"offsets": usable, "unusable": [entry.as_json() for entry in entries if entry.problem]})
    else:
        output().print(list_table(entries))
    _fail_on([entry.problem for entry in entries], shown=as_json)


@app.command()
def show(
    offset: Annotated[str, typer.Argument(metavar="DOMAIN|FILE", help="A domain of the store, or an offset file.")],
    store: StoreOption = Path("offsets"),
    as_json: JsonOption = False,
) -> None:
    """Show everything an offset file says: settings, metrics, base model.

    [bold]Example[/bold]: offset-runtime show legal
    """
    from offset_runtime.catalogue import details, details_table
    from offset_runtime.offset import SUFFIX, DomainOffset

    is_file = offset.endswith(SUFFIX)
    path = Path(offset) if is_file else OffsetStore(store).path(offset)
    fields = details(DomainOffset.load(path) if is_file else OffsetStore(store).get(offset), path)
    print_json(fields) if as_json else output().print(details_table(fields))


@app.command()
def verify(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Default: all of the store.")] = None,
    store: StoreOption = Path("offsets"),
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Also check that they fit this base model.")
    ] = None,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    llama_cpp: LlamaCppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read offset files strictly, and report every one that cannot be used. Exit code 2 if any cannot.

    [bold]Example[/bold]: offset-runtime verify --store offsets --model smollm2-135m
    """
    from offset_runtime.catalogue import check_base, read_files, read_store, verify_table

    spec = None if model is None else model_spec(model, backend, device, llama_cpp)
    entries = read_files(files) if files else read_store(OffsetStore(store))
    if spec is not None:
        with loaded(spec) as base:
            entries = check_base(entries, base.identity)
    print_json({"files": [e.as_json() for e in entries]}) if as_json else output().print(verify_table(entries))
    _fail_on([entry.problem for entry in entries], shown=True)


def _training_settings(recipe: str, documents: int, changes: dict[str, Any]) -> TrainingSettings:
    from pydantic import ValidationError

    from offset_runtime.training import TrainingSettings

    recipes: dict[str, Callable[..., TrainingSettings]] = {
        "default": TrainingSettings,
        "paper": partial(TrainingSettings.paper, documents),
    }
    if recipe not in recipes:
        raise InvalidRequestError(f"--recipe {recipe}: expected default or paper{nearest_hint(recipe, recipes)}")
    try:
        return recipes[recipe](**changes)
    except ValidationError as error:
        problem = error.errors()[0]
        option = "".join(str(part) for part in problem["loc"]).replace("prompt_format", "format").replace("_", "-")
        where = f"--{option} {problem['input']}" if option else "train"
        raise InvalidRequestError(f"{where}: {problem['msg'].removeprefix('Value error, ')}") from error


def _train(
    base: Backend, documents: Documents, domain: str, settings: TrainingSettings, held_back: Documents | None
) -> DomainOffset:
    from offset_runtime.backends.torch import TorchBackend
    from offset_runtime.training import TrainingProgress, train

    if not isinstance(base, TorchBackend):
        raise InvalidRequestError(f"training needs the torch backend; this model runs on {base.name!r}")
    with progress_bar("preparing the documents and the base's own replies") as bar:

        def update(at: TrainingProgress) -> None:
            look = "" if at.gain_percent is None else f", gain {at.gain_percent:.1f} %, KL {at.kl:.3f}"
            bar(f"loss {at.loss:.3f}{look}", at.step, at.steps)
            if not messages().is_terminal and at.step % settings.validate_every == 0:
                # A log file gets a line for each look, since a bar cannot be drawn in it.
                messages().print(f"step {at.step} of {at.steps}: loss {at.loss:.3f}{look}", soft_wrap=True)

        return train(base, documents, domain, settings, validation=held_back, progress=update)


def _kept(store: OffsetStore, offset: DomainOffset) -> Path:
    """Write the offset to the store, or, rather than lose minutes of training, to a folder for temporary files."""
    import tempfile

    try:
        return store.put(offset)
    except OffsetFileError as error:
        path = offset.save(Path(tempfile.mkdtemp(prefix="offset-runtime-")) / store.path(offset.domain).name)
        raise OffsetFileError(f"{error}. What was trained is not lost: it is in {path}") from error


def _print_trained(offset: DomainOffset, path: Path, as_json: bool) -> None:
    from offset_runtime.catalogue import Entry, details, list_table

    if as_json:
        print_json(details(offset, path))
        return
    output().print(list_table([Entry(path, offset)]))
    count = offset.metrics["documents"]
    gain = (
        f"gain on {count} documents that were held back" if count else "too few documents to hold any back for a gain"
    )
    output().print(f"wrote {path}; {gain}", soft_wrap=True)


def _offsets(folder: Path, names: list[str], *, others: bool) -> dict[str, DomainOffset]:
    """Read the named offsets of a store, and all `others` if asked for; named ones come first."""
    store = OffsetStore(folder)
    rest = [name for name in store.domains() if name not in names] if others else []
    if not names and not rest:
        raise InvalidRequestError(f"no offsets in {folder}; train one with 'offset-runtime train', or give --store")
    return {name: store.get(name) for name in [*names, *rest]}


def _test_documents(options: list[str]) -> dict[str, Documents]:
    """Read ``DOMAIN=PATH`` options; a domain may have several."""
    from offset_runtime.documents import read_documents

    sources: dict[str, list[str]] = {}
    for option in options:
        domain, separator, path = option.partition("=")
        if not (domain and separator and path):
            raise InvalidRequestError(f"--docs {option}: expected DOMAIN=PATH, for example legal=test.jsonl")
        sources.setdefault(domain, []).append(path)
    return {domain: read_documents(paths) for domain, paths in sources.items()}


def _texts(file: Path) -> list[str]:
    from offset_runtime.documents import read_documents

    documents = read_documents([file]).items
    if any(document.messages for document in documents):
        raise DocumentError(f"{file} holds conversations; score takes texts")
    return [document.text for document in documents]


def _fail_on(problems: list[str | None], *, shown: bool) -> None:
    """End with the exit code of a user's error if there is a problem, saying each one unless the result did."""
    found = [problem for problem in problems if problem]
    for problem in [] if shown else found:
        print_error(problem)
    if found:
        raise typer.Exit(EXIT_USER_ERROR)
