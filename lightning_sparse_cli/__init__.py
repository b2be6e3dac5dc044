"""The command ``lightning-sparse``.

A package beside ``lightning_sparse``: importing that one imports torch and Lightning, and ``--help`` and ``--version``
must not wait for them. :mod:`~lightning_sparse_cli.commands` has the subcommands.
"""

from __future__ import annotations

import difflib
import inspect
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any, get_args, get_origin, get_type_hints

from lightning_sparse_cli.commands import advise, dashboard, judge, need, probe, report, simulate

COMMANDS: dict[str, Callable[..., None]] = {
    "probe": probe,
    "advise": advise,
    "simulate": simulate,
    "judge": judge,
    "report": report,
    "dashboard": dashboard,
}
"""Subcommands; their signatures give the options. What can only be given by position is an argument."""
PURPOSE = (
    "Tools for sparsified gradient exchange in PyTorch Lightning: find out whether and how it pays, compare methods, "
    "and look at runs."
)
EXAMPLES = "examples:"
GO_ON = ("simulate", "judge")
"""Those that keep what is finished."""


def main(args: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        args: the command line without the command's name; None: what this process was called with.
    """
    words = sys.argv[1:] if args is None else list(args)
    if words[:1] == ["--version"]:  # needs no package
        return _print_versions()
    need("jsonargparse", "docstring_parser")
    parser = _parser()
    try:
        given = parser.parse_args(words)
    except UnicodeDecodeError as error:
        parser.error(f"Expected --config to be a file in UTF-8: {error}")
    options = given[given.subcommand].as_dict()
    command = COMMANDS[given.subcommand]
    arguments = [options.pop(name) for name, one in _parameters(command).items() if _is_argument(one)]
    try:
        command(*arguments, **{name: options[name] for name in _parameters(command) if name in options})
    except KeyboardInterrupt:
        note = " The same command goes on from here." if given.subcommand in GO_ON else ""
        print(f"Interrupted.{note}", file=sys.stderr)
        raise SystemExit(130) from None  # as shells say it


def _parameters(command: Callable[..., None]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(command).parameters)


def _is_argument(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_ONLY


def _parser() -> Any:
    from docstring_parser import parse
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    class Formatter(DefaultHelpFormatter):
        def _fill_text(self, text: str, width: int, indent: str) -> str:
            """Examples keep their lines."""
            return text if text.startswith(EXAMPLES) else str(super()._fill_text(text, width, indent))

    class Parser(ArgumentParser):
        known: Sequence[str] = ()

        def error(self, message: str, ex: Exception | None = None) -> Any:
            """In the words of the command line, with what is close to a command or an option that is not known."""
            if "are required: " in message:
                message = re.sub(rf"\b({'|'.join(COMMANDS)})\.(\w+)", required, message)
            message = re.sub(
                "^'(.+)' object is not iterable$", r"Expected a list of values in --config, but got one \1", message
            )
            message = re.sub(
                r".*\"config\": File does not exist: (.+)", r"Expected --config to be a file: no \1", message
            )
            unknown = r"(?:unrecognized arguments: |invalid choice: '|does not accept option ')(-*)([\w-]+)"
            if wrong := re.search(unknown, message):
                of = getattr(ex, "subcommand_parser", None) or self  # keys of a file are refused by the main parser
                close = difflib.get_close_matches(wrong[2], of.known, n=1)
                message += f". Did you mean {wrong[1]}{close[0]}?" if close else ""
            super().error(message, ex)

    def required(found: re.Match[str]) -> str:
        argument = _is_argument(_parameters(COMMANDS[found[1]])[found[2]])
        return f"{'' if argument else '--'}{found[2]}"

    parser = Parser(prog="lightning-sparse", description=PURPOSE, allow_abbrev=False, formatter_class=Formatter)
    parser.known = [*COMMANDS, "version", "help"]
    parser.add_argument("--version", action="store_true", help="Versions and the device, for reports.")
    subcommands = parser.add_subcommands(required=True)
    for name, command in COMMANDS.items():
        kinds, text = get_type_hints(command), parse(command.__doc__ or "")
        described = {param.arg_name: param.description for param in text.params}
        examples = "".join(f"\n  {line}" for one in text.examples for line in (one.description or "").splitlines())
        options = Parser(description=text.short_description, epilog=EXAMPLES + examples, allow_abbrev=False)
        options.known = [*_parameters(command), "config", "help"]
        if "config" not in kinds:
            options.add_argument("--config", action="config", help="Path to a file with these options.")
        for option, parameter in _parameters(command).items():
            element = _element(kinds[option])
            settings: dict[str, Any] = {"type": element or kinds[option]}
            if kinds[option] is bool:
                settings = {"action": "store_true"}
            if element:
                settings["nargs"] = "+"
            if _is_argument(parameter):
                options.add_argument(option, help=described[option], **settings)
                continue
            if parameter.default is not parameter.empty:
                settings["default"] = parameter.default
            else:
                settings |= {"required": True} | ({"action": "extend"} if element else {})
            options.add_argument(f"--{option}", help=described[option], **settings)
        subcommands.add_subcommand(name, options, help=text.short_description)
    return parser


def _element(kind: Any) -> Any:
    """``int`` of ``list[int]`` and of ``list[int] | None``; None of everything else."""
    return next((get_args(one)[0] for one in (kind, *get_args(kind)) if get_origin(one) is list), None)


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
