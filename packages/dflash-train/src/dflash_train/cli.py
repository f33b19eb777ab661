"""``key=value`` command lines over structured configurations, with errors a person can act on."""

import difflib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_model.errors import UserError

Config = TypeVar("Config")
STOPPED = 130  # as shells count Ctrl-C
USER_ERROR = 2  # exit code of a wrong setting, file or model


def flat_keys(schema: type, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted name, default and help line of every key."""
    for item in fields(schema):
        name = prefix + item.name
        hint = get_type_hints(schema)[item.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from flat_keys(hint, name + ".")
        else:
            default = (
                item.default
                if item.default is not NO_DEFAULT
                else item.default_factory()
                if item.default_factory is not NO_DEFAULT
                else ""
            )
            yield name, default, item.metadata.get("help", "")


def help_text(schema: type, usage: str) -> str:
    """All keys with defaults, one line each."""
    rows = [
        (f"{name}={'' if default in (None, '???') else default}", text) for name, default, text in flat_keys(schema)
    ]
    width = min(max(len(left) for left, _ in rows), 40)
    return usage + "\n\n" + "\n".join(f"  {left:<{width}}  {text}" for left, text in rows)


def parse(schema: type[Config], argv: list[str], usage: str, default_config: str | None = None) -> Config:
    """Merge defaults, ``config=FILE`` and the command line, in this order.

    Raises:
        UserError: an argument that is not ``key=value``, an unknown key, or a value of the wrong type.
    """
    if any(argument in ("--help", "-h", "help") for argument in argv):
        print(help_text(schema, usage))
        if default_config:
            print(f"\nWithout config=FILE, {default_config} is read.")
        raise SystemExit(0)
    known = [name for name, _, _ in flat_keys(schema)]
    given: dict[str, str] = {}
    for argument in argv:
        name, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"{argument!r} is not key=value (--help lists the keys)")
        given[name] = value
    file = given.pop("config", default_config or "")
    if file and file == default_config and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"no config=FILE given: {file} it is\n")
    merged = OmegaConf.structured(schema)
    try:
        if file:
            merged = _merge(merged, _read_yaml(file), known, file)
            merged = OmegaConf.merge(merged, {"config": file})
        for name, text in given.items():
            change = OmegaConf.create()
            OmegaConf.update(change, name, _value(schema, name, text))
            merged = _merge(merged, change, known, "command line")
        for name in sorted(OmegaConf.missing_keys(merged)):
            raise UserError(f"{name} is not set; give it in the config file or as {name}=…")
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'a key'}: {str(error).splitlines()[0]}") from error


def _read_yaml(file: str) -> DictConfig:
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"config is {file}; there is no such file")
    try:
        loaded = OmegaConf.load(path)
    except yaml.YAMLError as error:
        raise UserError(f"config is {file}; it is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, DictConfig):
        raise UserError(f"config is {file}; it must hold sections of keys")
    return loaded


def _merge(base: DictConfig, change: DictConfig | ListConfig, known: list[str], origin: str) -> DictConfig:
    for name in _leaves(change):
        if not any(name == k or name.startswith(k + ".") for k in known):
            raise UserError(f"{name} ({origin}) is not a key{_nearest(name, known)} (--help lists all)")
    merged = OmegaConf.merge(base, change)
    assert isinstance(merged, DictConfig)
    return merged


def _nearest(name: str, known: list[str]) -> str:
    """A key of the same name in another section, or one that is spelled alike."""
    same = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    near = same or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; the nearest is {near[0]}" if near else ""


def _leaves(node: Any, prefix: str = "") -> Iterator[str]:  # noqa: ANN401 - OmegaConf nodes
    if isinstance(node, DictConfig) and len(node):
        for name in node:
            yield from _leaves(node._get_node(name), f"{prefix}{name}.")
    elif prefix:
        yield prefix.rstrip(".")


def _value(schema: type, name: str, text: str) -> Any:  # noqa: ANN401 - any type a setting can have
    """An argument's value by the type of its key: text stays as typed, ``a,b`` is a list, the rest is YAML.

    Raises:
        UserError: it is not YAML where it must be.
    """
    hint: Any = schema
    for part in name.split("."):
        hint = get_type_hints(hint).get(part) if is_dataclass(hint) and isinstance(hint, type) else None
    if hint is str or (hint == str | None and text != "null"):
        return text.replace("${", "\\${")  # a prompt may hold code: nothing in it refers to another key
    if "list[" in str(hint) and not text.startswith("["):
        text = f"[{text}]"
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is {text!r}; it is not YAML: {str(error).splitlines()[0]}") from error


def run_tool(main: Callable[[list[str]], int]) -> None:
    """Run a tool's main; a UserError becomes one sentence on stderr and exit code 2."""
    if "RANK" in os.environ:
        # Until a job listens for signals, Ctrl-C ends it at once, without a traceback from every rank.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    except UserError as error:
        # All ranks of a job meet a wrong setting at once; the others leave the sentence to rank 0, unless it has not
        # met the error. torchrun stops them as soon as rank 0 has left.
        if os.environ.get("RANK", "0") != "0":
            time.sleep(4)
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = USER_ERROR
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr, flush=True)
        code = STOPPED
    sys.stdout.flush()
    os._exit(code) if "RANK" in os.environ else sys.exit(code)
