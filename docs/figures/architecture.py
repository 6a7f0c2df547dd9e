"""Pictures of the code: its rooms, the threads of a worker, the life of a chunk."""

from __future__ import annotations

from docs.figures.svg import Picture

ROOMS = {
    "rankmill.extensions": ("each complete in its folder", "a", {
        "grpc": "TEI's gRPC", "batches": "OpenAI's batches", "registry": "models by name",
        "gateway": "dialects, keys, HTTP", "runners": "submitted runs, webhooks",
        "rankings": "mine, evaluate", "lab": "tune, quantize, experiment", "page": "the live page",
    }),
    "rankmill": ("what people touch", "a", {
        "cli": "commands", "score": "a file from end to end", "cluster": "snapshot, verdict, exporter",
        "testing": "clients without a server", "plugins": "finds extensions",
    }),
    "rankmill.producer": ("pairs in, scores out", "d", {
        "client": "Client, its asyncio twin, runs", "local": "embedded server, processes",
        "files": "formats, corpus, stores, sink", "collect": "driver, collector, journal",
    }),
    "rankmill.jobs": ("contract and protocol", "b", {
        "protocol": "runs, leases, reports in Redis", "model_names": "what they stand for",
        "model_files": "which a model has",
        "cache": "digests of files",
        "runtime": "settings, connection, logs", "contract": "spec, wire, results, keys",
        "system": "clocks, threads, disks",
    }),
    "rankmill.workers": ("scoring", "c", {
        "worker": "puts a worker together", "queue": "claims, chunks, heartbeat",
        "rq": "all that is RQ's", "engine": "pipeline, budget, cache", "models": "sources, loading, tokenizer",
        "backends": "torch, openvino, onnx, mlx", "batches": "planner, tokens", "host": "device, memory, metrics",
    }),
}  # fmt: skip
"""What each room is for, its colour, and its parts from the top to the bottom."""


def rooms() -> str:
    """The rooms and their parts."""
    picture = Picture(
        1250,
        510,
        "The rooms of the code",
        "An arrow says who imports whom. Inside a room each part imports only parts below it.",
    )
    places = dict(zip(ROOMS, range(20, 1250, 250), strict=True))
    for room, (what, colour, parts) in ROOMS.items():
        left = places[room]
        picture.box(left, 70, 210, 420, "card", edge=colour, radius=10)
        picture.text(left + 14, 94, f"{room.removeprefix('rankmill.')}/", "bold")
        picture.text(left + 14, 112, what, "soft")
        for number, (part, does) in enumerate(parts.items()):
            top = 124 + 41 * number
            picture.box(left + 8, top, 194, 36, "box", radius=5)
            picture.text(left + 18, top + 15, part, "mono")
            picture.text(left + 18, top + 30, does, "soft")
    for start, end in ((231, 269), (481, 519), (731, 769), (1019, 981)):
        picture.line([(start, 300), (end, 300)], "soft", arrow=True)
    picture.line([(375, 491), (375, 501), (875, 501), (875, 492)], "soft", arrow=True)
    return str(picture)


def worker() -> str:
    """The threads of a worker."""
    picture = Picture(
        900,
        230,
        "Inside a worker",
        "Boxes are threads, except the waiting rows. No box waits for the next.",
    )
    boxes = (
        (150, "main thread", ("fetches, decodes,", "tokenizes"), "a"),
        (340, "waiting rows", ("lanes: requests,", "bulk work"), "pad"),
        (530, "forward thread", ("submits, waits,", "scatters"), "c"),
        (720, "writing thread", ("result and job's", "success at once"), "d"),
    )
    picture.box(20, 80, 90, 60, "box", edge="b", radius=8)
    picture.text(65, 115, "queue", "bold", anchor="middle")
    for left, name, lines, colour in boxes:
        picture.box(left, 70, 140, 80, "box", edge=colour, radius=8)
        picture.text(left + 70, 94, name, "bold", anchor="middle")
        for number, line in enumerate(lines):
            picture.text(left + 70, 116 + 18 * number, line, "soft", anchor="middle")
    for start, end in ((110, 149), (290, 339), (480, 529), (670, 719)):
        picture.line([(start, 110), (end, 110)], "soft", arrow=True)
    picture.line([(790, 150), (790, 172), (40, 172), (40, 141)], "soft", arrow=True)
    picture.text(420, 168, "finished chunks", "soft", anchor="middle")
    picture.box(340, 184, 330, 30, "box", edge="b", radius=8)
    picture.text(505, 204, "heartbeat thread: leases of all that is claimed", "soft", anchor="middle")
    picture.line([(340, 199), (65, 199), (65, 141)], "soft", dash="4 3", arrow=True)
    return str(picture)


_LIFE = (
    ("P", "R", "MULTI: SET pairs:7 (EX), job 7 (RQ enqueue_many), EXPIRE meta; EXEC"),
    ("W", "R", "BLMOVE queue → intermediate (RQ)"),
    ("W", "R", "job started, lease of lease_seconds (15 s)"),
    ("W", "R", "HGETALL meta, GET pairs:7"),
    ("W", "", "decode and tokenize, beside the forward of earlier chunks"),
    ("W", "R", "each heartbeat (5 s), in a thread: renew leases, return expired jobs"),
    ("W", "", "forward, in batches shared with other chunks"),
    ("W", "R", "MULTI: XADD results (scores, stats), delete job 7, end its lease; EXEC"),
    ("P", "R", "XREAD BLOCK results"),
    ("P", "", "result 7 to the journal, fsync"),
    ("P", "R", "UNLINK pairs:7, XDEL the entry"),
    ("P", "", "hold until chunks 0 to 6 are there (in memory, then on disk), then write"),
)


def life() -> str:
    """The life of a chunk: who says what to whom, from the top to the bottom."""
    step, top = 34, 96
    picture = Picture(1100, top + step * len(_LIFE) + 24, "The life of chunk 7")
    lanes = {"P": (90, "producer", "a"), "R": (550, "Redis", "b"), "W": (1010, "worker", "c")}
    for x, name, colour in lanes.values():
        picture.line([(x, 72), (x, top + step * len(_LIFE))], "edge", width=2)
        picture.box(x - 55, 44, 110, 28, "box", edge=colour, radius=8)
        picture.text(x, 63, name, "bold", anchor="middle")
    for number, (who, other, words) in enumerate(_LIFE):
        y = top + step * number + 12
        x, colour = lanes[who][0], lanes[who][2]
        anchor = "start" if who == "P" else "end"
        side = 14 if who == "P" else -14
        if other:
            end = lanes[other][0] + (-2 if who == "P" else 2)
            picture.line([(x, y), (end, y)], "soft", arrow=True)
            picture.text((x + end) / 2, y - 5, words, "soft", anchor="middle")
        else:
            picture.dot(x, y - 4, 5, colour)
            picture.text(x + side, y, words, "soft", anchor=anchor)
    return str(picture)
