"""The command ``lightning-sparse``.

A package beside ``lightning_sparse``: importing that one imports torch and Lightning, and ``--help`` and ``--version``
must not wait for them. :mod:`~lightning_sparse_cli.commands` has the subcommands.
"""

from __future__ import annotations

import difflib
import inspect
import platform
import shutil
import subprocess
import sys
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from lightning_sparse_cli.commands import advise, compare, probe, replay, report
from lightning_sparse_cli.options import OPTIONS

COMMANDS: dict[str, Callable[..., None]] = {
    "probe": probe,
    "advise": advise,
    "report": report,
    "compare": compare,
    "replay": replay,
}
"""Their signatures and :data:`~lightning_sparse_cli.options.OPTIONS` make the options. What can only be given by
position is an argument."""
PURPOSE = (
    "Tools for sparsified gradient exchange in PyTorch Lightning: find out whether and how it pays, look at runs, and "
    "compare sparsifiers."
)
EXAMPLES = "Examples:"
GO_ON = ("compare", "replay")
"""Those that keep what is finished."""


def main(args: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        args: the command line without the program's name; None: what this process was called with.
    """
    words = sys.argv[1:] if args is None else list(args)
    program, parsers = _parsers()
    name = words[0] if words and not words[0].startswith("-") else None
    if name is None:
        if program.parse(words).version:
            return _print_versions()
        program.error(f"expected a command, one of {', '.join(COMMANDS)}, but got none")
    if name not in COMMANDS:
        program.error(f"expected a command, one of {', '.join(COMMANDS)}, but got {name!r}" + program.close(name))
    given, command = parsers[name].parse(words[1:]), COMMANDS[name]
    arguments = [vars(given).pop(one.name) for one in _parameters(command) if _is_argument(one)]
    try:
        command(*arguments, **vars(given))
    except KeyboardInterrupt:
        note = " The same command goes on from here." if name in GO_ON else ""
        print(f"Interrupted.{note}", file=sys.stderr)
        raise SystemExit(130) from None  # as shells say it


class _Parser(ArgumentParser):
    """Answers what it cannot read in one line."""

    def __init__(self, prog: str, text: str, examples: str, known: Sequence[str]) -> None:
        description = "\n\n".join(textwrap.fill(" ".join(part.split()), 80) for part in text.split("\n\n"))
        kind = RawDescriptionHelpFormatter  # examples keep their lines
        super().__init__(prog, None, description, examples, formatter_class=kind, allow_abbrev=False, add_help=False)
        self.known = known
        self.add_argument("-h", "--help", action="help", help="Show this text.")

    def parse(self, words: Sequence[str]) -> Any:
        given, unknown = self.parse_known_args(words)
        if unknown:
            self.error(f"no option or argument {unknown[0]!r} is known" + self.close(unknown[0]))
        return given

    def close(self, word: str) -> str:
        """Return a question with what is close to a word, or nothing."""
        bare = word.lstrip("-").partition("=")[0]
        found = difflib.get_close_matches(bare, self.known, n=1)
        return f". Did you mean {word[: len(word) - len(word.lstrip('-'))]}{found[0]}?" if found else ""

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith("?") else "."
        print(f"{self.prog}: {message}{end} {self.prog} --help explains the options.", file=sys.stderr)
        raise SystemExit(2)


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the program, for its help, and those of its commands."""
    program = _Parser("lightning-sparse", PURPOSE, "", [*COMMANDS, "version", "help"])
    program.add_argument("--version", action="store_true", help="Print versions and the device, for reports of errors.")
    listed = program.add_subparsers(title="commands", metavar="COMMAND", prog=program.prog, parser_class=ArgumentParser)
    parsers = {}  # not those of the list, which would find what is unknown too late
    for name, command in COMMANDS.items():
        text, _, examples = inspect.cleandoc(command.__doc__ or "").partition(f"\n\n{EXAMPLES}\n")
        listed.add_parser(name, help=" ".join(text.partition("\n\n")[0].split()))
        known = [one.name for one in _parameters(command)]
        parser = parsers[name] = _Parser(f"{program.prog} {name}", text, f"{EXAMPLES}\n{examples}", [*known, "help"])
        kinds = get_type_hints(command)
        for one in _parameters(command):
            _add(parser, one, kinds[one.name])
    return program, parsers


def _add(parser: _Parser, parameter: inspect.Parameter, kind: Any) -> None:
    """Add an option, or an argument, with its default as the last sentence of its help."""
    default = None if parameter.default is parameter.empty else parameter.default
    element = next((get_args(one)[0] for one in (kind, *get_args(kind)) if get_origin(one) is list), None)
    settings: dict[str, Any] = {"help": OPTIONS[parameter.name].replace("%", "%%"), "default": default}
    if kind is bool:
        settings["action"] = "store_true"
    else:
        settings["type"] = _reader(element or next(one for one in (*get_args(kind), kind) if isinstance(one, type)))
    if default not in (None, False, []):
        shown = " ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default) if element else default
        settings["help"] += f" Default: {shown}."
    if _is_argument(parameter):
        parser.add_argument(parameter.name, nargs="*", **settings)
        return
    if element:
        settings["nargs"] = "+"
    if parameter.default is parameter.empty:
        settings |= {"required": True, "action": "extend"}
    parser.add_argument(f"--{parameter.name}", **settings)


def _reader(kind: type) -> Callable[[str], Any]:
    """Return what reads a word of the command line as a number, a path or itself."""

    def read(word: str) -> Any:
        try:
            return kind(word)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ArgumentTypeError(f"expected {wanted}, but got {word!r}") from None

    return read


def _parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(command).parameters.values())


def _is_argument(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_ONLY


def _print_versions() -> None:
    """Without importing what they are of."""
    for package in ("lightning-sparse", "torch", "pytorch-lightning", "lightning", "numpy"):
        try:
            print(package, _torch_version() if package == "torch" else version(package))
        except PackageNotFoundError:
            print(package, "is not installed")
    print("python", platform.python_version())
    print("device:", _device())
    print("kernels on CPUs:", _kernels("choose"))
    print("kernels on CUDA:", _kernels("choose_on_cuda"))


def _torch_version() -> str:
    """With the build, such as ``+cpu``, which metadata of some builds lack."""
    found = find_spec("torch")
    file = None if found is None or found.origin is None else Path(found.origin).with_name("version.py")
    return str(run_path(str(file))["__version__"]) if file and file.exists() else version("torch")


def _kernels(question: str) -> str:
    """On CPUs compiled ones, for which instructions, or numpy; on CUDA those in Triton, or torch's operations."""
    package = find_spec("lightning_sparse")  # does not import it
    assert package is not None and package.origin is not None
    library = run_path(str(Path(package.origin).with_name("ops") / "c" / "library.py"))
    try:
        chosen = library[question]()
    except (ImportError, ValueError) as error:
        return str(error)
    if question == "choose":
        return str(chosen[1])
    return "Triton's, compiled when they are first used" if chosen is None else f"torch, {chosen}"


def _device() -> str:
    """Names of the GPUs as their driver knows them, or the processor's."""
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return ", ".join(answer.stdout.strip().splitlines())
    return f"CPU ({platform.processor() or platform.machine()})"
