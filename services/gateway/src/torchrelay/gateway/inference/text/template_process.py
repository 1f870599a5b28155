"""The process that renders chat templates: it runs strangers' code, so it holds nothing and may do nothing.

Started as a script by ``templates.TemplateRenderer``; imports Jinja2 and the standard library alone. Each line on
standard input is a job, ``{"template", "variables"}``; each gets one line back, ``{"text"}`` or ``{"error"}``. Before
the first job it gives up its rights to open files or sockets, to start processes, to write files and to grow; each job
has a number of CPU seconds, after which the system kills the process. The environment is the one that transformers
renders templates in, without the helpers for training.
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
    """What templates call to refuse messages."""
    raise jinja2.TemplateError(str(message))


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own filter escapes HTML, which is no business of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; here it shows what is inside."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja2 declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PlainDict:
    """``dict`` without its class."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class PlainNamespace(jinja2.utils.Namespace):
    """A namespace without underscored names, which lead to the internals of CPython."""

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
        raise jinja2.exceptions.SecurityError(f"a namespace holds no name with an underscore before it: {name!r}")


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

    def __init__(self, max_output_bytes: int) -> None:
        self._max_output_bytes = max_output_bytes
        self._compiled = lru_cache(MAX_TEMPLATES)(make_environment().from_string)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. Raises whatever the template raises, ``ValueError`` for too long a text."""
        pieces: list[str] = []
        num_chars = 0
        for piece in self._compiled(template).generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > self._max_output_bytes:
                raise ValueError(f"the text is longer than {self._max_output_bytes} characters")
        return "".join(pieces)

    def answer(self, line: str) -> dict[str, str]:
        """The reply to one job: whatever goes wrong in a template is the template's fault."""
        try:
            job = json.loads(line)
            return {"text": self.render(job["template"], job["variables"])}
        except MemoryError:
            return {"error": "it needs too much memory"}
        except RecursionError:
            return {"error": "it nests too deeply"}
        except Exception as error:  # a template can raise anything
            return {"error": (str(error) or type(error).__name__)[:500]}


def drop_privileges(max_memory_bytes: int) -> None:
    """Caps memory and takes away files, sockets, processes and core dumps, for good."""
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
    """The block may use this much CPU, else the process is killed: also when nobody waits for it any more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + limit_s, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def main() -> None:
    max_memory_bytes, limit_s, max_output_bytes = (int(word) for word in sys.argv[1:4])
    renderer = Renderer(max_output_bytes)
    # Whatever is imported late is imported now: how to fail, too.
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
