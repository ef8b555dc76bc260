"""How far a long job is: one line rewritten in place in a terminal, one bar with that line in a notebook.

    with Progress(total=1000, unit="samples") as progress:
        progress.update(samples=1, tok=812, bytes=5_612_544)

Every number of `update` is what came on top since the last call, so the bytes shown are a true running total. In a notebook it is one output that is
changed in place: HTML's own <progress> element, which screen readers know and which follows light and dark, with plain text beside it. The saved page
holds its last state, without widgets and without scripts. Into a log file (neither terminal nor notebook) it writes a whole line now and then. In a
background job (`eyas.jobs`) it writes into the job's folder, from where whoever follows the job draws the same bar.
"""

import json
import os
import sys
import time
from html import escape
from pathlib import Path

from eyas.files import read_parquet

MARK = '<div class="eyas-progress"'  # how the HTML of a bar begins
job_folder: Path | None = None  # of the background job that this process is; set by eyas.jobs


def duration_text(seconds: float) -> str:
    """0:07, 4:31, 1:02:45."""
    minutes, rest = divmod(int(round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number_text(value: float) -> str:
    """Three digits, no exponent: 0.0123, 5.35, 41.2, 923, 27,620."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def bytes_text(count: int) -> str:
    """Binary units: 812 B, 5.35 MiB, 923 GiB."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{number_text(value)} {unit}"


def _in_notebook() -> bool:
    shell = getattr(
        sys.modules.get("IPython"), "get_ipython", lambda: None
    )()  # a kernel has IPython loaded already
    return shell is not None and hasattr(shell, "kernel")


class Bar:
    """Where a line and its share are shown: a terminal, a notebook, a log or a job's folder, whichever this is. A few times a second at most."""

    def __init__(self):
        self._job = job_folder
        self._notebook = self._job is None and _in_notebook()
        self._terminal = self._job is None and not self._notebook and sys.stderr.isatty()
        live = self._job or self._notebook or self._terminal
        self._redraw_s = 0.2 if self._terminal else 0.5 if live else 30.0
        self._due_s = time.monotonic() + (0.0 if live else self._redraw_s)
        self._handle, self._width, self._shown = None, 0, None
        self._before = (
            read_bars(self._job) if self._job else []
        )  # a job may have one bar after the other

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._due_s

    def draw(self, text: str, share: float | None, closed: bool = False) -> None:
        """`share` is done / total, 0 to 1; None: unknown. `closed`: it is the last one."""
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
            padding = " " * max(
                0, self._width - len(text)
            )  # wipes the rest of a longer line before it
            self._width = len(text)
            print(f"\r{text}{padding}", end="\n" if closed else "", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def bar_html(text: str, share: float | None) -> str:
    """A bar and its text; the text is the element's name too, so that a screen reader says it."""
    value = "" if share is None else f' value="{100 * share:.1f}"'
    return (
        f'{MARK} style="margin: .3rem 0"><label><progress max="100"{value} style="display: block; width: 100%; max-width: 40rem; height: .8rem; '
        f'accent-color: #2f7fc1"></progress><span style="font-size: .9em; font-variant-numeric: tabular-nums">{escape(text)}</span></label></div>'
    )


def read_bars(folder: Path) -> list[dict]:
    """The bars of a job so far, the last one may go on: text, share, closed."""
    try:
        return json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    except OSError:
        return []


def write_bars(folder: Path, bars: list[dict]) -> None:
    """Whole or not at all; no fsync, twice a second for something that only says how far a living process is."""
    temporary = folder / f".progress.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(bars), encoding="utf-8")
    os.replace(temporary, folder / "progress.json")


class Progress:
    """`total` units to do (0: unknown). `update` adds, `close` shows the final state. Redraws at most a few times a second."""

    def __init__(self, total: int, unit: str = "samples"):
        self.total, self.unit = total, unit
        self.samples = self.tok = self.bytes = self.errors = 0
        self.note = ""
        self.started_s = time.monotonic()
        self._bar, self._closed = Bar(), False
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
        """Add to the counts; `errors` are units that failed and count as done. `note` is shown at the end of the line, until the next one."""
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
        """The text shown, e.g. `412/1000 samples, 41 % | 14.2 samples/s | 3,412 tok/s | 1.24 GiB | 0 errors | 0:29, 0:41 left`."""
        elapsed_s = max(time.monotonic() - self.started_s, 1e-9)
        done = self.samples + self.errors
        parts = [
            f"{done:,}/{self.total:,} {self.unit}, {100 * done // self.total} %"
            if self.total
            else f"{done:,} {self.unit}"
        ]
        parts.append(f"{number_text(done / elapsed_s)} {self.unit}/s")
        if self.tok:
            parts.append(f"{self.tok / elapsed_s:,.0f} tok/s")
        if self.bytes:
            parts.append(bytes_text(self.bytes))
        parts.append(f"{self.errors:,} error{'' if self.errors == 1 else 's'}")
        left = (
            duration_text(elapsed_s * (self.total - done) / done) + " left"
            if done and not self._closed and done < self.total
            else ""
        )
        parts.append(", ".join(filter(None, (duration_text(elapsed_s), left))))
        if self.note:
            parts.append(self.note)
        return " | ".join(parts)

    def _draw(self) -> None:
        share = (
            (self.samples + self.errors) / self.total
            if self.total
            else 1.0
            if self._closed
            else None
        )  # nothing keeps moving in a saved page
        self._bar.draw(self.line(), share, self._closed)


class LiveFigure:
    """A figure that is drawn anew every few seconds while a cell runs: call it as often as you like, e.g. as `on_step` of `eyas.training.trainer.train`.

    `draw(table)` makes the figure (a matplotlib Axes) of the parquet file at `path`, once that is there. Outside a notebook nothing is drawn. `close`
    takes it away, so that a saved page has only the final ones.
    """

    def __init__(self, draw, path, every_s: float = 15.0):
        self._draw, self._path, self._every_s, self._drawn_s = draw, path, every_s, time.monotonic()
        self._handle, self._on = None, _in_notebook()

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
        plt.close(figure)  # or the cell would show it once more at its end
        self._drawn_s = time.monotonic()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)
