# SPDX-License-Identifier: Apache-2.0
"""What byte_lm.py shows: progress while it trains, a table and a picture afterwards."""

import importlib
import sys
from dataclasses import dataclass, field


@dataclass
class Run:
    """What one recipe's training gave. Losses are in nats per byte."""

    recipe: str
    train_losses: list = field(default_factory=list)
    held_out: list = field(default_factory=list)  # pairs (step, loss)
    tokens_per_second: float = 0.0  # without the first step, which compiles
    first_step_seconds: float = 0.0
    total_seconds: float = 0.0
    graphs: int = 0

    @property
    def final_loss(self):
        """Held-out loss after the last step."""
        return self.held_out[-1][1]


class Progress:
    """tqdm on a terminal where it is installed; otherwise a line for each tenth of the way."""

    def __init__(self, label, total):
        self.label, self.total, self.done = label, total, 0
        self.meter = None
        if sys.stderr.isatty():
            try:
                self.meter = importlib.import_module("tqdm").tqdm(
                    total=total, desc=label, unit="step"
                )
            except ImportError:
                pass

    def step(self, loss):
        """Count one step and show its loss."""
        self.done += 1
        if self.meter is not None:
            self.meter.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self.meter.update()
        elif self.done * 10 // self.total > (self.done - 1) * 10 // self.total:
            filled = self.done * 20 // self.total
            shown = "#" * filled + "." * (20 - filled)
            print(
                f"{self.label:>8} [{shown}] {self.done}/{self.total}  loss {loss:.3f}", flush=True
            )

    def close(self):
        """Leave the bar on the screen and go to the next line."""
        if self.meter is not None:
            self.meter.close()


def distances(runs):
    """Final held-out loss of each run relative to the high-precision run's, or {} without one."""
    reference = next((run for run in runs if run.recipe == "none"), None)
    if reference is None:
        return {}
    return {run.recipe: run.final_loss / reference.final_loss - 1 for run in runs}


def print_table(runs):
    """One line for each run."""
    relative = distances(runs)
    header = f"{'recipe':<9}{'train loss':>11}{'held-out':>10}{'vs none':>9}{'tokens/s':>11}"
    print(f"\n{header}{'1st step s':>12}{'total s':>9}{'graphs':>8}")
    for run in runs:
        tail = run.train_losses[-10:]
        versus = f"{relative[run.recipe]:+.2%}" if run.recipe in relative else "-"
        print(
            f"{run.recipe:<9}{sum(tail) / len(tail):>11.4f}{run.final_loss:>10.4f}{versus:>9}"
            f"{run.tokens_per_second:>11,.0f}{run.first_step_seconds:>12.1f}"
            f"{run.total_seconds:>9.1f}{run.graphs:>8}"
        )


def plot(runs, path, title):
    """Write the loss curves as a PNG. Returns False, with a message, without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        print("No picture: matplotlib is not installed (pip install matplotlib).")
        return False
    matplotlib.use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for number, run in enumerate(runs):
        steps = range(1, len(run.train_losses) + 1)
        axes.plot(steps, run.train_losses, color=f"C{number}", alpha=0.3, linewidth=1)
        label = f"{run.recipe}: held-out {run.final_loss:.3f}"
        axes.plot(*zip(*run.held_out), color=f"C{number}", marker="o", markersize=4, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend(title="thin: training, dots: held-out")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
