"""Inject faults into runs, and check that each ends in exact continuation or in a message of two lines at most.

    make faults                                           # all classes and algorithms
    make faults ARGS="--seed 2 --cases 50"                # other faults, 50 of each class
    make faults ARGS="--only kills sac --cases 10"
    make faults ARGS="--seed 2 --case files/iql/17"       # one case again, as a failure prints it

docs/reliability.md describes the classes and the outcomes. The exit status is 1 if a case failed.
"""

import common.start

import os
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from bench.faults import environments, folders, inputs
from bench.faults.runs import ALGORITHMS, ROOT, Fault, Verdict
from bench.report.tables import Table
from common.arguments import at_least
from common.command_line import command_line
from common.errors import InputError, RunError
from common.files import write_json
from common.messages import log, print_result
from common.provenance import commit, versions

PASSED = ("continued", "refused", "accepted")
OUTCOMES = (*PASSED, "WRONG", "TRACEBACK", "MESSAGE", "HANG", "LOST")
PAGE, RESULTS = ROOT / "docs" / "reliability.md", ROOT / "results" / "reliability.json"
START, END = "<!-- faults, by make faults -->\n", "<!-- end -->"
Draw = Callable[[str, int, int], Fault | None]


def listed(faults: Callable[[str, int], list[Fault]]) -> Draw:
    """Return a function that gives the fault of a number, or None after the last one."""
    return lambda algo, seed, index: next(iter(faults(algo, seed)[index : index + 1]), None)


# The algorithms of each class, and the function that makes a fault of an algorithm, a seed and a number.
CLASSES: dict[str, tuple[tuple[str, ...], Draw]] = {
    "kills": (ALGORITHMS, folders.kills),
    "files": (ALGORITHMS, folders.files),
    "flags": (ALGORITHMS, listed(inputs.flags)),
    "datasets": (("bc", "iql"), listed(inputs.datasets)),
    "suites": (("sweep",), listed(inputs.suites)),
    "environments": (("sac", "ppo"), listed(environments.environments)),
}


class Case(NamedTuple):
    """The name of a case, which with the seed determines its fault."""

    kind: str
    algo: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.algo}/{self.number}"


class Result(NamedTuple):
    """A case, its fault in words, and its verdict."""

    case: Case
    what: str
    verdict: Verdict


@dataclass(frozen=True)
class Args:
    """Which faults to inject."""

    seed: int = 1
    """Seed of the faults."""
    cases: int = 350
    """Most cases of each class, spread over its algorithms."""
    only: tuple[str, ...] = ()
    """A class, or a class and an algorithm: kills sac."""
    case: str | None = None
    """Name of one case, such as kills/sac/3, to inject again."""
    jobs: int = 2
    """Cases at the same time."""
    json: Path | None = None
    """File to write with the counts and every failure. results/reliability.json also remakes docs/reliability.md."""

    def __post_init__(self) -> None:
        at_least(1, cases=self.cases, jobs=self.jobs)
        at_least(0, seed=self.seed)
        kind, algo = (*self.only, None, None)[:2]
        if len(self.only) > 2 or (self.only and (kind not in CLASSES or (algo and algo not in CLASSES[kind][0]))):
            raise InputError(
                f"--only is {' '.join(self.only)}: give one of {', '.join(CLASSES)}, then an algorithm of it"
            )
        if (self.only or self.case) and self.json and self.json.resolve() == RESULTS:
            raise InputError(f"--json is {self.json}, which counts all classes: give another file, or all classes")


def cases_of(args: Args) -> Iterator[Case]:
    """Yield the cases to inject. Raise InputError if `--case` names none."""
    if args.case:
        kind, _, rest = args.case.partition("/")
        algo, _, index = rest.partition("/")
        if kind not in CLASSES or algo not in CLASSES[kind][0] or not index.isdecimal():
            raise InputError(f"--case is {args.case}: give one as it is printed, such as kills/sac/3")
        yield Case(kind, algo, int(index))
        return
    for kind in args.only[:1] or CLASSES:
        algorithms = args.only[1:] or CLASSES[kind][0]
        for number in range(args.cases):
            yield Case(kind, algorithms[number % len(algorithms)], number // len(algorithms))


def inject(case: Case, seed: int) -> Result | None:
    """Inject a fault in a folder of its own. Return None if the class has no case of this number."""
    fault = CLASSES[case.kind][1](case.algo, seed, case.number)
    if fault is None:
        return None
    folder = Path(tempfile.mkdtemp(dir=os.environ["ONRAMP_FAULTS"]))
    try:
        return Result(case, fault.what, fault.check(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def injected(args: Args) -> Iterator[Result]:
    """Yield the result of each case, in processes that are forked before anything has computed."""
    with tempfile.TemporaryDirectory(prefix="onramp-faults-") as folder:
        os.environ["ONRAMP_FAULTS"] = folder
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("fork")) as pool:
            waiting = [pool.submit(inject, case, args.seed) for case in cases_of(args)]
            try:
                yield from filter(None, (each.result() for each in waiting))
            finally:  # a case that cannot be injected ends the program at once, not after all others
                pool.shutdown(cancel_futures=True)


def counts_of(results: list[Result]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the number of cases by class, algorithm and outcome."""
    found: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for result in results:
        found[result.case.kind][result.case.algo][result.verdict.outcome] += 1
    return {kind: {algo: dict(count) for algo, count in algos.items()} for kind, algos in found.items()}


def table(counts: dict[str, dict[str, dict[str, int]]]) -> Table:
    """Return a row for each class and algorithm, and one for all."""
    rows = {(kind, algo): count for kind, algos in counts.items() for algo, count in algos.items()}
    rows["all", ""] = dict(sum(map(Counter, rows.values()), Counter()))
    found = Table(("class", "algorithm", "injected", *OUTCOMES))
    for (kind, algo), count in rows.items():
        numbers = [f"{count[outcome]:,}" if count.get(outcome) else "" for outcome in OUTCOMES]
        found.rows.append((kind, algo, f"{sum(count.values()):,}", *numbers))
    return found


def last_line(text: str) -> str:
    """Return the last line, which names the error, without this machine's paths."""
    return text.strip().rpartition("\n")[2].replace(f"{ROOT}/", "")


def with_table(text: str, report: dict[str, Any]) -> str:
    """Return the page with a new table between its markers."""
    before, rest = text.split(START)
    run = f"Seed {report['seed']}, commit `{report['commit'][:8]}`, {report['seconds'] / 60:,.0f} minutes:\n\n"
    return f"{before}{START}{run}{table(report['counts']).markdown()}\n{END}{rest.split(END, 1)[1]}"


def main(args: Args) -> None:
    """Inject all faults, print the failures and the table, and write the files. Raise RunError if a case failed."""
    started, results = time.monotonic(), []
    log.info(f"faults with seed {args.seed}")
    for result in injected(args):
        results.append(result)
        if args.case or result.verdict.outcome not in PASSED:
            log.info(f"{result.verdict.outcome}: {result.case.name} ({result.what})\n    {result.verdict.seen}")
    counts, failures = counts_of(results), [each for each in results if each.verdict.outcome not in PASSED]
    print_result(table(counts).markdown())
    if args.json:
        report = {
            "seed": args.seed, "cases": args.cases, "commit": commit(), "versions": versions(),
            "seconds": round(time.monotonic() - started), "counts": counts,
            "failures": [
                {"case": case.name, "fault": what, "outcome": verdict.outcome, "seen": last_line(verdict.seen)}
                for case, what, verdict in failures
            ],
        }  # fmt: skip
        write_json(args.json, report)
        if args.json.resolve() == RESULTS:
            PAGE.write_text(with_table(PAGE.read_text(), report))
    if failures:
        raise RunError(
            f"{len(failures)} of {len(results)} cases failed: inject one again by --seed {args.seed} --case NAME"
        )


if __name__ == "__main__":
    command_line(main, Args)
