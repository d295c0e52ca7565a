"""A breakdown as an Excel file: one sheet with the layer's kernels, one with the step's."""

from pathlib import Path
from typing import TYPE_CHECKING

from tools.traces.breakdown import Breakdown, KernelTotal, Row

if TYPE_CHECKING:
    from openpyxl.worksheet.worksheet import Worksheet

LAYER_HEADER = (
    "cpu_module",
    "gpu_kernel",
    "duration_us",
    "pct%",
    "sum per module",
    "module_pct%",
    "avg duration_us",
    "avg sum per module",
)
TOTALS_HEADER = ("gpu_kernel", "calls", "total_duration_us", "avg_duration_us", "pct%")
_PER_MODULE = (1, 5, 6, 8)  # columns, from 1
_WIDTHS = {"A": 32, "B": 72}
_WIDTH = 18


def write_workbook(breakdown: Breakdown, sheet: str, path: Path) -> None:
    """Write the file. Raises OSError, and ModuleNotFoundError without openpyxl."""
    from openpyxl import Workbook

    book = Workbook()
    layer = book.active
    layer.title = sheet
    _fill_layer(layer, breakdown)
    _fill_totals(book.create_sheet("kernel_summary"), breakdown.totals)
    for page in book.worksheets:
        _shape(page)
    book.save(path)


def _fill_layer(page: "Worksheet", breakdown: Breakdown) -> None:
    page.append(LAYER_HEADER)
    total = breakdown.total_us
    for rows in breakdown.modules():
        start = page.max_row + 1
        for row in rows:
            page.append(_layer_row(row, rows, total))
        if len(rows) > 1:
            for column in _PER_MODULE:
                page.merge_cells(
                    start_row=start, end_row=page.max_row, start_column=column, end_column=column
                )
    averages = [row.average_us for row in breakdown.rows if row.average_us is not None]
    average = _figure(sum(averages)) if averages else None
    page.append(("TOTAL", None, _figure(total), 100.0, _figure(total), 100.0, average, average))


def _layer_row(row: Row, module: list[Row], total: float) -> tuple[str | float | None, ...]:
    together = sum(one.duration_us for one in module)
    averages = [one.average_us for one in module if one.average_us is not None]
    return (
        row.module,
        row.kernel,
        _figure(row.duration_us),
        _percent(row.duration_us, total),
        _figure(together),
        _percent(together, total),
        None if row.average_us is None else _figure(row.average_us),
        _figure(sum(averages)) if averages else None,
    )


def _fill_totals(page: "Worksheet", totals: list[KernelTotal]) -> None:
    page.append(TOTALS_HEADER)
    whole = sum(one.total_us for one in totals)
    for one in totals:
        average = _figure(one.total_us / one.calls)
        page.append((one.kernel, one.calls, _figure(one.total_us), average, _percent(one.total_us, whole)))
    calls = sum(one.calls for one in totals)
    page.append(("TOTAL", calls, _figure(whole), _figure(whole / calls) if calls else None, 100.0))


def _shape(page: "Worksheet") -> None:
    from openpyxl.styles import Alignment, Font

    page.freeze_panes = "A2"
    for row in (page[1], page[page.max_row]):
        for cell in row:
            cell.font = Font(bold=True)
    for merged in page.merged_cells.ranges:
        merged.start_cell.alignment = Alignment(vertical="center")
    for column in "ABCDEFGH":
        page.column_dimensions[column].width = _WIDTHS.get(column, _WIDTH)


def _figure(microseconds: float) -> float:
    return round(microseconds, 3)


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0
