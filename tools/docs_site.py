"""Pages of the documentation's site that are made from the source; MkDocs calls the hooks, as mkdocs.yml names them.

The README files of the repository, deploy/ and bench/ become pages, and the references of the APIs come from the schema
of the gateway and from the protocol files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrelay.gateway.http.openapi import described
from torchrelay.gateway.http.rest_app import routes_app

_ROOT = Path(__file__).resolve().parents[1]
_PROTOCOLS = _ROOT / "proto" / "src" / "torchrelay"
_COPIED: Mapping[str, str] = {"README.md": "start.md", "deploy/README.md": "deploy.md", "bench/README.md": "bench.md"}
_SERVICES: Mapping[str, str] = {
    "inference/v1/inference.proto": "Generation",
    "inference/v2/open_inference.proto": "The Open Inference Protocol",
    "control/v1/external_scaler.proto": "KEDA's external scaler, served by the scheduler",
}
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links that lead to pages of the site; a link to another file of the repository becomes its path."""
    name = page.file.src_uri
    if name.startswith("api/"):
        return markdown
    source = next((path for path, copy in _COPIED.items() if copy == name), f"docs/{name}")
    return _LINK.sub(lambda link: _linked(link, (_ROOT / source).parent), markdown)


def pages() -> dict[str, str]:
    """The generated pages, by path in the site."""
    made = {name: (_ROOT / path).read_text() for path, name in _COPIED.items()}
    made["api/rest-reference.md"] = "\n".join(_rest_lines(described(routes_app())))
    made["api/grpc-reference.md"] = "\n".join(_grpc_lines())
    return made


def _linked(link: re.Match[str], folder: Path) -> str:
    text, target, anchor = link[1], link[2], link[3] or ""
    if "://" in target:
        return link[0]
    path = (folder / target).resolve()
    inside = path.relative_to(_ROOT).as_posix()
    if not path.exists():
        return link[0]  # a page that is made, or a mistake: MkDocs checks it
    name = _COPIED.get(inside) or _COPIED.get(f"{inside}/README.md")
    if name is not None:
        return f"{text}({name}{anchor})"
    if inside.startswith("docs/"):
        return f"{text}({inside.removeprefix('docs/')}{anchor})"
    return f"{text.removeprefix('[').removesuffix(']')} (`{inside}`)"


def _rest_lines(schema: Mapping[str, Any]) -> Iterator[str]:
    yield "# REST reference\n"
    yield "Made from the schema at `/openapi.json`. [The REST API](../rest.md) explains how the paths work together.\n"
    for path, operations in sorted(schema["paths"].items()):
        for method, operation in operations.items():
            yield f"## {method.upper()} {path}\n"
            yield f"{operation.get('description') or operation.get('summary', '')}\n"
            if parameters := operation.get("parameters"):
                yield from _table(
                    (each["name"], each["in"], _kind(each["schema"]), each.get("description", ""))
                    for each in parameters
                )
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"Body: `{kind}`{_name_of(content['schema'])}\n"
            answers = {status: each for status, each in operation["responses"].items() if status < "300"}
            for status, answer in answers.items():
                schemas = [content.get("schema", {}) for content in answer.get("content", {}).values()]
                yield f"{status}: {answer['description']}{''.join(map(_name_of, schemas))}\n"
    yield "## Objects\n"
    for name, each in sorted(schema["components"]["schemas"].items()):
        yield f"### {name}\n"
        if each.get("description"):
            yield f"{each['description']}\n"
        needed = each.get("required", ())
        yield from _table(
            (field, "required" if field in needed else "", _kind(kind), kind.get("description", ""))
            for field, kind in each.get("properties", {}).items()
        )


def _table(rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        return
    yield "| name | | type | meaning |\n|---|---|---|---|"
    for name, place, kind, meaning in listed:
        yield f"| `{name}` | {place} | {kind} | {' '.join(meaning.split()).replace('|', chr(92) + '|')} |"
    yield ""


def _name_of(schema: Mapping[str, Any]) -> str:
    return f", [{name}](#{name.lower()})" if (name := schema.get("$ref", "").rpartition("/")[2]) else ""


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a field, in a few words."""
    if reference := schema.get("$ref"):
        return f"[{reference.rpartition('/')[2]}](#{reference.rpartition('/')[2].lower()})"
    if choices := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_kind, choices)))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    kind = schema.get("type", "any")
    limits = [f"{sign} {schema[key]}" for key, sign in (("minimum", ">="), ("maximum", "<=")) if key in schema]
    return " ".join([kind if isinstance(kind, str) else " or ".join(kind), ", ".join(limits)]).strip()


def _grpc_lines() -> Iterator[str]:
    yield "# gRPC reference\n"
    yield "The protocol files of the services that clients outside the platform call. The key travels as metadata,"
    yield "`authorization: Bearer KEY`; [the REST page](../rest.md) has an example in Python.\n"
    for path, title in _SERVICES.items():
        yield f"## {title}\n\n```proto\n{(_PROTOCOLS / path).read_text().strip()}\n```\n"
