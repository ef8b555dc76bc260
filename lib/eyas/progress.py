"""Show the progress of a long job: one line in a terminal, or a bar in a notebook.

    with Progress(total=1000, unit="samples") as progress:
        progress.update(samples=1, tok=812, bytes=5_612_544)

- Every number of `update` is added to a running total.
- In a terminal, the line is rewritten in place.
- In a notebook, one output is changed in place: HTML's own <progress> element with plain text
  beside it. Screen readers know that element, and it follows light and dark. The saved page holds
  its last state, without widgets and scripts.
- In a log file, a whole line is written now and then.
- In a background job (`eyas.jobs`), the bar is written into the job's folder. Whoever follows the
  job draws the same bar from there.
"""

import json
import os
import sys
import time
from html import escape
from pathlib import Path

from eyas.files import read_parquet

MARK = '<div class="eyas-progress"'  # how the HTML of a bar begins
job_folder: Path | None = None  # if this process is a background job; set by eyas.jobs


def duration_text(seconds: float) -> str:
    """Return a duration as text, for example 0:07, 4:31 or 1:02:45."""
    minutes, rest = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number_text(value: float) -> str:
    """Return a number with three digits and no exponent: 0.0123, 5.35, 41.2, 923, 27,620."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def bytes_text(count: int) -> str:
    """Return a number of bytes in binary units, for example 812 B, 5.35 MiB or 923 GiB."""
    value = float(count)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value /= 1024
        unit = larger
    return f"{number_text(value)} {unit}"


def _in_notebook() -> bool:
    # A kernel has loaded IPython already.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class Bar:
    """Show a line and its share: in a terminal, a notebook, a log or a job's folder.

    It is redrawn at most a few times a second.
    """

    def __init__(self):
        self._job = job_folder
        self._notebook = self._job is None and _in_notebook()
        self._terminal = self._job is None and not self._notebook and sys.stderr.isatty()
        live = self._job or self._notebook or self._terminal
        self._redraw_s = 30.0
        if self._terminal:
            self._redraw_s = 0.2
        elif live:
            self._redraw_s = 0.5
        self._due_s = time.monotonic() + (0.0 if live else self._redraw_s)
        self._handle = None
        self._width = 0
        self._shown = None
        # A job may have one bar after the other.
        self._before = read_bars(self._job) if self._job else []

    @property
    def due(self) -> bool:
        """Return whether it is time to draw again."""
        return time.monotonic() >= self._due_s

    def draw(self, text: str, share: float | None, closed: bool = False) -> None:
        """Show the text and the share, unless they are shown already.

        share: done / total, from 0 to 1; None if unknown. closed: this is the last drawing.
        """
        self._due_s = time.monotonic() + self._redraw_s
        if (text, share, closed) == self._shown:
            return
        self._shown = text, share, closed
        if self._job:
            write_bars(self._job, [*self._before, {"text": text, "share": share, "closed": closed}])
        elif self._notebook:
            from IPython.display import display

            data = {"text/plain": text, "text/html": bar_html(text, share)}
            if self._handle is None:
                self._handle = display(data, raw=True, display_id=True)
            else:
                self._handle.update(data, raw=True)
        elif self._terminal:
            padding = " " * max(0, self._width - len(text))  # wipes a longer line before it
            self._width = len(text)
            print(f"\r{text}{padding}", end="\n" if closed else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def bar_html(text: str, share: float | None) -> str:
    """Return the HTML of a bar and its text.

    The text is also the element's name, so that a screen reader says it.
    """
    value = "" if share is None else f' value="{100 * share:.1f}"'
    return (
        f'{MARK} style="margin: .3rem 0"><label><progress max="100"{value}'
        ' style="display: block; width: 100%; max-width: 40rem; height: .8rem; '
        'accent-color: #2f7fc1"></progress>'
        '<span style="font-size: .9em; font-variant-numeric: tabular-nums">'
        f"{escape(text)}</span></label></div>"
    )


def read_bars(folder: Path) -> list[dict]:
    """Return the bars of a job so far, each with text, share and closed."""
    try:
        return json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    except OSError:
        return []


def write_bars(folder: Path, bars: list[dict]) -> None:
    """Write the bars of a job, whole or not at all.

    There is no fsync: they only matter while the process lives, and are written twice a second.
    """
    temporary = folder / f".progress.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(bars), encoding="utf-8")
    os.replace(temporary, folder / "progress.json")


class Progress:
    """Count units of work and show them. `total`: units to do; 0 if unknown.

    `update` adds to the counts, and `close` shows the final state.
    """

    def __init__(self, total: int, unit: str = "samples"):
        self.total = total
        self.unit = unit
        self.samples = self.tok = self.bytes = self.errors = 0
        self.note = ""
        self.started_s = time.monotonic()
        self._bar = Bar()
        self._closed = False
        if self._bar.due:
            self._draw()

    def update(
        self,
        samples: int = 0,
        tok: int = 0,
        bytes: int = 0,
        errors: int = 0,
        note: str | None = None,
    ) -> None:
        """Add to the counts.

        errors: units that failed; they count as done. note: text at the end of the line, until the
        next note.
        """
        self.samples += samples
        self.tok += tok
        self.bytes += bytes
        self.errors += errors
        if note is not None:
            self.note = note
        if self._bar.due:
            self._draw()

    def close(self) -> None:
        """Show the final state; calling it twice does nothing."""
        if not self._closed:
            self._closed = True
            self._draw()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:
            self.note = (
                "interrupted" if issubclass(kind, KeyboardInterrupt) else "stopped by an error"
            )
        self.close()

    def line(self) -> str:
        """Return the text that is shown, for example

        412/1000 samples, 41 % | 14.2 samples/s | 3,412 tok/s | 1.2 GiB | 0 errors | 0:29, 0:41 left
        """
        elapsed_s = max(time.monotonic() - self.started_s, 1e-9)
        done = self.samples + self.errors
        count = f"{done:,} {self.unit}"
        if self.total:
            count = f"{done:,}/{self.total:,} {self.unit}, {100 * done // self.total} %"
        parts = [count, f"{number_text(done / elapsed_s)} {self.unit}/s"]
        if self.tok:
            parts.append(f"{self.tok / elapsed_s:,.0f} tok/s")
        if self.bytes:
            parts.append(bytes_text(self.bytes))
        parts.append(f"{self.errors:,} error{'' if self.errors == 1 else 's'}")
        times = duration_text(elapsed_s)
        if done and not self._closed and done < self.total:
            times += f", {duration_text(elapsed_s * (self.total - done) / done)} left"
        parts.append(times)
        if self.note:
            parts.append(self.note)
        return " | ".join(parts)

    def _draw(self) -> None:
        share = None
        if self.total:
            share = (self.samples + self.errors) / self.total
        elif self._closed:
            share = 1.0  # a bar without a value would move in a saved page
        self._bar.draw(self.line(), share, self._closed)


class LiveFigure:
    """Draw a figure again every few seconds while a cell runs.

    Call it as often as you like, for example as `on_step` of `eyas.training.trainer.train`.
    `draw(table)` returns a matplotlib Axes for the parquet file at `path`, once that exists.
    Outside a notebook nothing is drawn. `close` removes the figure, so that a saved page only has
    the final ones.
    """

    def __init__(self, draw, path, every_s: float = 15.0):
        self._draw = draw
        self._path = path
        self._every_s = every_s
        self._drawn_s = time.monotonic()
        self._handle = None
        self._on = _in_notebook()

    def __call__(self, *_) -> None:
        if (
            not self._on
            or time.monotonic() - self._drawn_s < self._every_s
            or not self._path.is_file()
        ):
            return
        import matplotlib.pyplot as plt
        from IPython.display import display

        figure = self._draw(read_parquet(self._path)).figure
        if self._handle is None:
            self._handle = display(figure, display_id=True)
        else:
            self._handle.update(figure)
        plt.close(figure)  # otherwise the cell would show it again at its end
        self._drawn_s = time.monotonic()

    def close(self) -> None:
        """Remove the figure."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)
