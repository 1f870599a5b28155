"""The process that renders chat templates, which are untrusted code.

Run as a script by ``template_renderer.TemplateRenderer``; imports only Jinja2 and the standard library. Each line on
stdin is a job, ``{"template", "variables"}``, answered by one line, ``{"text"}`` or ``{"error"}``. Before the first job
it drops its rights to open files or sockets, start processes, write files and grow; a job that exceeds its CPU seconds
gets the process killed. The Jinja2 environment is that of transformers, without the helpers for training.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATES = 32


def raise_exception(message: object) -> NoReturn:
    """Called by templates to reject messages."""
    raise jinja2.TemplateError(str(message))


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja2's filter, which escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; rendered here as its content."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja2 declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainDict:
    """``dict`` without access to the class itself."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PlainNamespace(jinja2.utils.Namespace):
    """A namespace without underscored names, which would give access to CPython internals."""

    def __init__(*args: Any, **fields: Any) -> None:  # no self: namespace(self=...) works, as in Jinja2
        attributes = dict(*args[1:], **fields)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attributes must not start with an underscore: {name!r}")


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = PlainDict()
    environment.globals["namespace"] = PlainNamespace
    return environment


class Renderer:
    """Compiles templates once and renders them."""

    def __init__(self, max_output_chars: int) -> None:
        self._max_output_chars = max_output_chars
        self._compiled = lru_cache(MAX_TEMPLATES)(make_environment().from_string)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. Raises whatever the template raises, and ``ValueError`` for too long an output."""
        pieces: list[str] = []
        num_chars = 0
        for piece in self._compiled(template).generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > self._max_output_chars:
                raise ValueError(f"the output is longer than {self._max_output_chars} characters")
        return "".join(pieces)

    def answer(self, line: str) -> dict[str, str]:
        """The reply to one job; every failure is reported as the template's."""
        try:
            job = json.loads(line)
            return {"text": self.render(job["template"], job["variables"])}
        except MemoryError:
            return {"error": "out of memory"}
        except RecursionError:
            return {"error": "nested too deeply"}
        except Exception as error:  # a template can raise anything
            return {"error": (str(error) or type(error).__name__)[:500]}


def drop_privileges(max_memory_bytes: int) -> None:
    """Irrevocably limits memory and forbids files, sockets, processes and core dumps."""
    for kind, limit in (
        (resource.RLIMIT_AS, max_memory_bytes),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


@contextmanager
def cpu_limit(limit_s: int) -> Iterator[None]:
    """Kills the process if the block uses more CPU, even if nobody waits for it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + limit_s, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def main() -> None:
    max_memory_bytes, limit_s, max_output_chars = (int(word) for word in sys.argv[1:4])
    renderer = Renderer(max_output_chars)
    # Triggers all lazy imports while files can be opened, including those of the error paths.
    renderer.render("{{ strftime_now('%Y') }}{{ x | tojson }}", {"x": {}})
    renderer.answer('{"template": "{{ raise_exception(1) }}", "variables": {}}')
    renderer.answer('{"template": "{% for %}", "variables": {}}')
    drop_privileges(max_memory_bytes)
    for line in sys.stdin:
        with cpu_limit(limit_s):
            reply = renderer.answer(line)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
