"""An invoice as CSV, and as a page for the printer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape

from torchrelay.gateway.billing.bills import Invoice
from torchrelay.gateway.billing.csv_table import Cell, cell_text, csv_bytes
from torchrelay.gateway.billing.money import CURRENCY, exact

_COLUMNS = ("item", "requests", "prompt tokens", "cached tokens", "output tokens", "cost", f"amount ({CURRENCY})")
_STYLE = """
body { font: 14px sans-serif; margin: 3em auto; max-width: 60em }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #ccc; padding: .4em; text-align: right }
th:first-child, td:first-child { overflow-wrap: anywhere; text-align: left }
tr:last-child { font-weight: bold }
"""


def csv_invoice(invoice: Invoice) -> bytes:
    return csv_bytes([[*_COLUMNS, "adjustment"], *_rows(invoice)])


def html_invoice(invoice: Invoice) -> bytes:
    """A page without scripts and without anything that a browser would load."""
    title = f"Invoice {invoice.number}" if invoice.closed_unix_us is not None else "Draft of an invoice"
    closed = ""
    if invoice.closed_unix_us is not None:
        closed = f"<p>Closed on {datetime.fromtimestamp(invoice.closed_unix_us / 1e6, UTC):%Y-%m-%d}</p>"
    head = "".join(f"<th>{escape(name)}</th>" for name in _COLUMNS)
    rows = "\n".join(f"<tr>{_html_cells(row[: len(_COLUMNS)])}</tr>" for row in _rows(invoice))
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{title}</h1>
<p>{escape(invoice.tenant)}, {invoice.period} (UTC)</p>{closed}
<table><thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></body></html>
"""
    return page.encode()


def _rows(invoice: Invoice) -> Iterable[list[Cell]]:
    """In CSV the last cell has the id of an adjustment."""
    for line in invoice.lines:
        prices = f"{line.prompt_nano}, {line.cached_nano} and {line.output_nano} nano-dollars per token"
        tokens = line.prompt_tokens, line.cached_tokens, line.completion_tokens
        yield [f"{line.model} at {prices}", line.requests, *tokens, exact(line.cost_nano), line.amount, None]
    for each in invoice.adjustments:
        yield [each.reason, *[None] * 4, exact(each.amount_nano), each.amount, each.adjustment_id]
    yield ["Total", *[None] * 4, exact(invoice.cost_nano), invoice.amount, None]


def _html_cells(row: Iterable[Cell]) -> str:
    return "".join(f"<td>{escape(cell_text(cell))}</td>" for cell in row)
