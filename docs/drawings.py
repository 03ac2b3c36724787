"""Write the drawings of the documentation, docs/images/*.svg: python docs/drawings.py

A drawing of a strategy has a lane for each process; time runs from left to right. Bars are work, arrows are messages.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
WIDTH, LEFT, RIGHT, LANE, BAR, TOP = 960, 120, 16, 74, 28, 64
COLORS = {"work": "#cfe3f7", "backward": "#fbe0c3", "disk": "#dfe8d0", "idle": "#eeeeee"}
STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:12px;fill:#1f2933}"
    ".title{font-size:15px;font-weight:600}.lane{font-weight:600}.small{font-size:11px;fill:#52606d}"
    ".axis{stroke:#cbd2d9;stroke-width:1}.message{stroke:#334e68;stroke-width:1.4;fill:none}"
    ".box{stroke:#829ab1;stroke-width:1}"
)


@dataclass
class Drawing:
    """An SVG picture under construction; coordinates are pixels."""

    title: str
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, color: str, label: str = "") -> None:
        """A rounded box, its label centred; lines of the label are separated by a line feed."""
        self.parts.append(
            f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{color}"/>'
        )
        lines = label.split("\n")
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 4 + 14 * (number - (len(lines) - 1) / 2), line, anchor="middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start", style: str = "") -> None:
        """One line of text."""
        kind = f' class="{style}"' if style else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A straight arrow."""
        self.parts.append(
            f'<line class="message" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" marker-end="url(#head)"/>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A thin grey line."""
        self.parts.append(f'<line class="axis" x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"/>')

    def svg(self) -> str:
        """The file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{self.height}" '
            f'viewBox="0 0 {WIDTH} {self.height}" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#334e68"/></marker></defs>\n'
            f'<rect width="{WIDTH}" height="{self.height}" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


class Timeline(Drawing):
    """Lanes of processes over time; ``length`` is the number of time units of the whole width."""

    def __init__(self, title: str, lanes: list[str], length: float, text: str) -> None:
        notes = textwrap.wrap(text, 125)
        super().__init__(title, TOP + LANE * len(lanes) + 18 * len(notes) + 14)
        self.scale = (WIDTH - LEFT - RIGHT) / length
        self.text(16, 26, title, style="title")
        self.text(WIDTH - RIGHT, 26, "time →", anchor="end", style="small")
        for number, lane in enumerate(lanes):
            self.text(16, self.middle(number) + 4, lane, style="lane")
            self.line(LEFT, self.middle(number), WIDTH - RIGHT, self.middle(number))
        for number, note in enumerate(notes):
            self.text(16, TOP + LANE * len(lanes) + 14 + 18 * number, note, style="small")

    def middle(self, lane: int) -> float:
        """The height of a lane."""
        return TOP + LANE * lane + LANE / 2 - 10

    def at(self, time: float) -> float:
        """The position of a time."""
        return LEFT + time * self.scale

    def bar(self, lane: int, start: float, end: float, label: str, color: str = "work") -> None:
        """Work of a process."""
        self.box(self.at(start), self.middle(lane) - BAR / 2, (end - start) * self.scale, BAR, COLORS[color], label)

    def send(self, lane: int, to_lane: int, start: float, end: float, label: str = "", shift: float = 0) -> None:
        """A message between two lanes; its label stands at the middle of the arrow, ``shift`` pixels to the right."""
        sign = 1 if to_lane > lane else -1
        y, to_y = self.middle(lane) + sign * BAR / 2, self.middle(to_lane) - sign * BAR / 2
        self.arrow(self.at(start), y, self.at(end), to_y)
        if label:
            self.text((self.at(start) + self.at(end)) / 2 + 7 + shift, (y + to_y) / 2 + 4, label, style="small")


def sar() -> Drawing:
    """One layer of two ranks, forward and backward, in mode 1."""
    chart = Timeline(
        "sar, mode 1: one layer of a training step on two ranks",
        ["rank 0", "rank 1"],
        100,
        (
            "A rank adds up messages block by block: first of its own nodes, while the rows of remote neighbours "
            "(the halo) travel. Mode 1 drops a remote block after use and fetches it again in the backward pass. "
            "Mode 2 keeps the blocks; mode 3 fetches all of them in one exchange. At the end of the step the "
            "gradients of the weights are summed over the ranks."
        ),
    )
    for lane, other in ((0, 1), (1, 0)):
        chart.bar(lane, 0, 16, "own block")
        chart.bar(lane, 18, 32, "remote block")
        chart.bar(lane, 34, 42, "loss", "idle")
        chart.bar(lane, 44, 60, "own block", "backward")
        chart.bar(lane, 62, 76, "remote block", "backward")
        chart.bar(lane, 84, 92, "update", "idle")
        chart.send(lane, other, 2 + 2 * lane, 18 + 1 * lane, "halo rows" if lane == 0 else "")
        chart.send(lane, other, 46 + 2 * lane, 62 + 1 * lane, "halo rows again" if lane == 0 else "")
        chart.send(lane, other, 74 + 1 * lane, 80 + 1 * lane)
    chart.text(chart.at(82), chart.middle(0) + LANE / 2 + 4, "gradients", style="small")
    return chart


def pyg() -> Drawing:
    """Sampling, fetching and training of successive batches."""
    chart = Timeline(
        "pyg: batches are made ahead of the step that trains on them",
        ["rank 0: model", "rank 0: features", "rank 0: samplers", "rank 1: owner"],
        100,
        (
            "A sampler grows a batch from its seeds, hop by hop; nodes whose edges another machine stores cost "
            "one request per owner and hop. Remote features of the next batch travel while a batch trains; local "
            "ones are copied when its step starts. After each step the ranks sum their gradients."
        ),
    )
    for batch in range(3):
        chart.bar(2, 2 + 22 * batch, 20 + 22 * batch, f"sample batch {batch}")
        chart.bar(1, 24 + 22 * batch, 42 + 22 * batch, f"rows of batch {batch}", "disk")
        if batch < 2:
            chart.bar(0, 46 + 22 * batch, 60 + 22 * batch, f"train {batch}", "backward")
            chart.bar(0, 60.5 + 22 * batch, 67 + 22 * batch, "sum", "idle")
    for start in (4, 26, 48):
        chart.send(2, 3, start, start + 4, "frontier" if start == 4 else "")
        chart.send(3, 2, start + 8, start + 12, "neighbours" if start == 4 else "")
        chart.bar(3, start + 4, start + 8, "", "idle")
    chart.bar(0, 90, 99.5, "train 2", "backward")
    for batch in range(3):
        chart.send(2, 1, 20 + 22 * batch, 24.5 + 22 * batch, "ids" if batch == 0 else "")
        chart.send(1, 0, 42 + 22 * batch, 46.5 + 22 * batch, "x" if batch == 0 else "")
    return chart


def pbg() -> Drawing:
    """Buckets, with partitions written behind and read ahead."""
    chart = Timeline(
        "pbg: buckets of edges, and the partitions of the table that they need",
        ["workers", "memory: slots", "disk or servers", "lock server"],
        100,
        (
            "A bucket holds the edges between two partitions. Two slots of memory hold its partitions, a third "
            "one takes the next. Workers update rows without locks (Hogwild). Several machines lease buckets from "
            "the lock server, two of which never share a partition, and exchange partitions through partition "
            "servers instead of a disk."
        ),
    )
    for lane_start, bucket, slots in ((4, "(0, 1)", "partitions 0, 1"), (36, "(1, 2)", "1, 2"), (68, "(2, 0)", "2, 0")):
        chart.bar(0, lane_start, lane_start + 28, f"train bucket {bucket}", "backward")
        chart.bar(1, lane_start, lane_start + 28, slots)
        chart.send(3, 0, lane_start - 3, lane_start + 1)
    chart.text(chart.at(6), chart.middle(3) - 20, "grant bucket", style="small")
    chart.bar(3, 0, 98, "leases, heartbeats", "idle")
    for start, label in ((8, "read 2"), (40, "read 0")):
        chart.bar(2, start, start + 18, label, "disk")
        chart.send(2, 1, start + 18, start + 24, "prefetch" if start == 8 else "")
    for start, label in ((34, "write 0"),):
        chart.send(1, 2, start - 2, start, "")
        chart.bar(2, 27, 38, label, "disk")
    chart.bar(2, 62, 76, "write 1", "disk")
    chart.send(1, 2, 64, 66, "write-behind")
    return chart


def ps() -> Drawing:
    """One step of a worker and a server."""
    chart = Timeline(
        "ps: one step of two workers and two servers",
        ["worker 0", "worker 1", "server 0", "server 1"],
        100,
        (
            "Servers hold blocks of the wide first layer. Workers send the ids and values of their sparse rows; "
            "servers return the rows' activations, a few numbers each. The gradients of the activations go back "
            "the same way, and servers update their blocks once per step, when all workers' gradients have "
            "arrived. The small rest of the network is replicated and its gradients are summed."
        ),
    )
    for worker in (0, 1):
        chart.bar(worker, 0, 12, "split rows")
        chart.bar(worker, 38, 50, "dense forward")
        chart.bar(worker, 51, 63, "backward", "backward")
        chart.bar(worker, 82, 98, "update dense layers", "idle")
    for server in (2, 3):
        chart.bar(server, 20, 32, "products")
        chart.bar(server, 70, 84, "update block", "backward")
        for worker in (0, 1):
            chart.send(worker, server, 12, 20)
            chart.send(server, worker, 32, 38)
            chart.send(worker, server, 63, 70)
    chart.text(chart.at(1), chart.middle(1) + LANE / 2 + 4, "sparse inputs", style="small")
    chart.text(chart.at(23), chart.middle(1) + LANE / 2 + 4, "activations", style="small")
    chart.text(chart.at(50), chart.middle(1) + LANE / 2 + 4, "gradients", style="small")
    return chart


def architecture() -> Drawing:
    """The packages of the framework, and the way of one batch through them."""
    drawing = Drawing("The packages of gtrain, and one batch on its way", 470)
    drawing.text(16, 26, "The packages of gtrain, and one batch on its way", style="title")
    rows = [
        ("command", [("gtrain.cli", "compose, explain"), ("gtrain.config, settings", "what keys mean")]),
        ("launch", [("gtrain.launch", "agent, ranks, rendezvous"), ("gtrain.run", "task, checks, report")]),
        (
            "training",
            [
                ("plugins/gtrain_*", "shard and exchange"),
                ("gtrain.strategy", "gradients, groups"),
                ("gtrain.model, nn", "modules and layers"),
            ],
        ),
        ("data", [("gtrain.data", "read, prepare, batches"), ("gtrain.graph", "store, shard, sampling")]),
        ("ground", [("gtrain.wire", "requests and replies"), ("gtrain.kernels, memory", "compiled loops, pages")]),
    ]
    left, top, height, gap = 110, 48, 54, 18
    for number, (name, boxes) in enumerate(rows):
        y = top + number * (height + gap)
        drawing.text(16, y + height / 2 + 4, name, style="lane")
        width = (500 - gap * (len(boxes) - 1)) / len(boxes)
        for column, (package, role) in enumerate(boxes):
            color = COLORS["backward"] if package.startswith("plugins") else COLORS["work"]
            drawing.box(left + column * (width + gap), y, width, height, color, f"{package}\n{role}")
        if number:
            drawing.arrow(left + 250, y - gap + 1, left + 250, y - 2)
    drawing.text(
        left,
        top + 5 * (height + gap) + 4,
        "An arrow points from a package to those that it imports. The framework imports no plugin.",
        style="small",
    )
    steps = [
        "1  data.sources reads the user's files",
        "2  data.prepare checks and splits",
        "3  graph.partition cuts the graph",
        "4  graph.store writes one shard per part",
        "5  the strategy opens its shard",
        "6  the loader says which seeds a step has",
        "7  the strategy makes the batch: rows of",
        "    remote nodes travel over group or wire",
        "8  the module computes loss and gradients",
        "9  the strategy sums gradients, steps",
        "10 callbacks record; rank 0 reports",
    ]
    drawing.text(650, 62, "One batch", style="lane")
    for number, step in enumerate(steps):
        drawing.text(650, 86 + 24 * number, step)
    return drawing


def run() -> Drawing:
    """What the terminal shows of a run; the text is run.txt beside the drawings."""
    lines = (IMAGES / "run.txt").read_text().splitlines()
    drawing = Drawing("A run of gtrain in a terminal", 17 * len(lines) + 28)
    drawing.parts.append(f'<rect width="{WIDTH}" height="{drawing.height}" rx="8" fill="#1f2933"/>')
    for number, line in enumerate(lines):
        color = "#8fd3a8" if line.startswith("$") else "#e4e7eb"
        drawing.parts.append(
            f'<text xml:space="preserve" x="16" y="{25 + 17 * number}" textLength="{9.2 * len(line):.1f}" '
            f'style="font-family:monospace;font-size:13px;fill:{color}">{escape(line)}</text>'
        )
    return drawing


DRAWINGS = {"run": run, "sar": sar, "pyg": pyg, "pbg": pbg, "ps": ps, "architecture": architecture}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg())
