"""Pictures that need no measurement: the flow of pairs, and which command does which job."""

from __future__ import annotations

from docs.figures.svg import Picture


def flow() -> str:
    """How a pair gets its score."""
    picture = Picture(
        860,
        300,
        "How a pair gets its score",
        "Jobs name chunks; texts and scores travel as Arrow beside them.",
    )
    picture.box(24, 110, 110, 60, "box", edge="edge", radius=8)
    picture.text(79, 145, "input files", anchor="middle")
    picture.box(24, 210, 110, 60, "box", edge="edge", radius=8)
    picture.text(79, 245, "scored file", anchor="middle")
    picture.box(200, 110, 140, 160, "box", edge="a", radius=8)
    picture.text(270, 136, "producer", "bold", anchor="middle")
    for number, line in enumerate(("cuts chunks", "keeps a window", "puts scores in", "the input's order")):
        picture.text(270, 162 + 20 * number, line, "soft", anchor="middle")
    picture.box(440, 110, 130, 160, "box", edge="b", radius=8)
    picture.text(505, 136, "Redis, Valkey", "bold", anchor="middle")
    for number, line in enumerate(("jobs (RQ)", "chunks (Arrow)", "results (stream)", "leases")):
        picture.text(505, 162 + 20 * number, line, "soft", anchor="middle")
    for number in range(3):
        top = 84 + 70 * number
        picture.box(670, top, 166, 54, "box", edge="c", radius=8)
        picture.text(753, top + 23, f"worker {number + 1}", "bold", anchor="middle")
        picture.text(753, top + 42, "tokens, batches, model", "soft", anchor="middle")
        picture.line([(573, 150 + 40 * number), (668, top + 27)], "soft", arrow=True, back=True)
    picture.line([(134, 140), (198, 140)], "soft", arrow=True)
    picture.line([(200, 240), (136, 240)], "soft", arrow=True)
    picture.line([(340, 150), (438, 150)], "soft", arrow=True)
    picture.text(389, 142, "chunks", "soft", anchor="middle")
    picture.line([(440, 230), (342, 230)], "soft", arrow=True)
    picture.text(389, 222, "scores", "soft", anchor="middle")
    return str(picture)


_JOBS = (
    ("score files on this host", "score-file pairs.parquet"),
    ("score files on a cluster", "score-file … --redis URL"),
    ("hand files to the cluster, and leave", "rankmill submit, wait"),
    ("rerank a run", "score-file --run … --queries … --corpus …"),
    ("measure a ranking", "rankmill evaluate"),
    ("choose hard negatives", "rankmill mine"),
    ("score from Python", "rankmill.Client, AsyncClient, CrossEncoder"),
    ("answer over HTTP or gRPC", "rankmill serve"),
    ("start workers on a host", "score-workers"),
    ("see what a cluster does", "rankmill status, workers, exporter"),
    ("stop a run, take a host out of service", "rankmill cancel, workers drain"),
    ("find the best settings", "rankmill tune"),
    ("know what fewer bits cost", "rankmill check-precision"),
    ("bring a new model into production", "rankmill models push, promote"),
)
_GROUPS = (
    ("a file", 0, 3, "a"),
    ("a ranking", 3, 6, "b"),
    ("a service", 6, 8, "d"),
    ("a cluster", 8, 11, "c"),
    ("a choice", 11, 14, "a"),
)


def commands() -> str:
    """Which command for which job."""
    row = 30
    picture = Picture(
        860, 80 + row * len(_JOBS) + 12 * len(_GROUPS), "Which command when", "You have or want …"
    )
    gap = 0
    for name, first, end, colour in _GROUPS:
        top = 70 + row * first + gap
        middle = top + row * (end - first) / 2
        picture.box(20, middle - 17, 100, 34, "box", edge=colour, radius=8)
        picture.text(70, middle + 5, name, "bold", anchor="middle")
        for place, (job, command) in enumerate(_JOBS[first:end]):
            line = top + row * place + row / 2
            picture.line([(120, middle), (145, middle), (145, line), (172, line)], colour)
            picture.text(182, line + 4, job)
            picture.box(470, line - 12, 370, 24, "box", radius=5)
            picture.text(482, line + 4, command, "mono")
        gap += 12
    return str(picture)
