"""``kvxfer plan``: how many engines of which kind.

``kvxfer plan fit``: what their steps cost. ``kvxfer plan watch``: how many right now.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvxfer._help import manual, suggest
from kvxfer.errors import InvalidError
from kvxfer.serving.checks import at_least, positive
from kvxfer.serving.options import STATUS, add_load_arguments, workload_of
from kvxfer.serving.promise import Promise

if TYPE_CHECKING:  # --help needs none of it
    from kvxfer.serving.cost_model import Link
    from kvxfer.serving.fit import Costs
    from kvxfer.serving.live import Fetch
    from kvxfer.serving.metered import Metered
    from kvxfer.serving.planner import Plan, Question

_INFEASIBLE = {3: "no number of engines that there are meets the SLO"}
_MANUALS: dict[str, Any] = {
    "": {
        "about": "Says how many engines of which kind (prefill, decode, both in one) serve the "
        "most requests within the SLO, and why; the best candidates are simulated. Step times and "
        "link come from the setup, rates are requests a second.\n\n"
        "kvxfer plan fit finds the step times of what engines have served; kvxfer plan watch "
        "advises while engines serve. Each has a --help.",
        "status": {**STATUS, **_INFEASIBLE},
        "examples": [
            "kvxfer plan setup.json --gpus 16",
            "kvxfer plan setup.json --gpus 16 --serve 8 --trace trace.jsonl --plot plan.svg",
            "kvxfer plan setup.json --gpus 8 --placement rack=11e9 --placement far=1.1e9",
        ],
    },
    "fit": {
        "about": "Finds what the steps of engines cost, from a log of what they have served or "
        "from their metrics, for the setup of kvxfer plan: JSON on the standard output, the mean "
        "error on the other.",
        "status": STATUS,
        "examples": [
            "kvxfer plan fit requests.jsonl --batch-tokens 8192 > costs.json",
            "kvxfer plan fit --metrics http://d1:8200 --batch-tokens 8192 > costs.json",
        ],
    },
    "watch": {
        "about": "Reads live metrics of engines, and advises a ratio of prefill to decode engines "
        "as the load changes, until it is interrupted.",
        "status": STATUS,
        "examples": [
            "kvxfer plan watch setup.json --prefill http://p1:8100 --decode http://d1:8200 --gpus 8"
        ],
    },
}
CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.2)
"""Parts of its goodput at which a candidate's latency is plotted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvxfer plan``."""
    suggest(add_load_arguments(parser), ("fit", "watch"))
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help="how many there are at most"
    )
    parser.add_argument(
        "--serve",
        type=float,
        metavar="RATE",
        help="requests a second that have to be served, on as few GPUs as will do (default: as "
        "many requests as possible)",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of requests that have to be within the SLO (default 0.9)",
    )
    parser.add_argument(
        "--promise",
        choices=[promise.value for promise in Promise],
        default=Promise.JOINT.value,
        help="whether the share meets TTFT and TPOT together, or each for itself (default joint)",
    )
    parser.add_argument(
        "--confirm",
        type=int,
        default=4,
        metavar="N",
        help="how many candidates to simulate (default 4)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw latency over throughput, as SVG")
    parser.add_argument(
        "--placement",
        action="append",
        default=[],
        metavar="NAME=BYTES_PER_SECOND",
        help="a link to compare, as measured; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Plan and print the plan; return 0, or 3 when nothing will do."""
    from kvxfer.serving.planner import Question, plan, shifts
    from kvxfer.serving.report import candidate_row, plan_text
    from kvxfer.serving.setup_file import read_setup

    at_least("--confirm", options.confirm)
    if options.plot and not Path(options.plot).absolute().parent.is_dir():
        raise InvalidError(f"--plot {options.plot}: its folder does not exist")
    setup = read_setup(options.setup)
    question = Question(
        workload_of(options),
        setup.slo,
        setup.engines,
        setup.link,
        options.gpus,
        setup.policy,
        Promise(options.promise),
        options.share,
        rate=options.serve,
    )
    answer = plan(question, options.confirm)
    if options.json:
        rows = [candidate_row(candidate) for candidate in answer.candidates]
        text = json.dumps({"infeasible": answer.infeasible, "candidates": rows}, indent=2)
    else:
        text = "\n".join([plan_text(answer, shifts(question)), *_placements(options, question)])
    sys.stdout.write(text + "\n")
    if options.plot:
        drawn = _plot(answer)
        try:
            Path(options.plot).write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise InvalidError(f"--plot {options.plot}: {error.strerror}") from error
    return 3 if answer.infeasible else 0


def _placements(options: argparse.Namespace, question: Question) -> list[str]:
    """Return what each link would do to an average prompt."""
    from kvxfer.serving.placement import judge
    from kvxfer.serving.sim import Role

    prefill = next((spec for spec in question.engines if spec.role is Role.PREFILL), None)
    lines = []
    for text in options.placement:
        name, _, rate = text.partition("=")
        if prefill is None or question.link is None:
            raise InvalidError("--placement needs prefill engines and a link in the setup")
        try:
            link: Link = dataclasses.replace(question.link, bytes_per_second=float(rate))
        except ValueError as error:
            raise InvalidError(f"--placement {text!r}: write NAME=BYTES_PER_SECOND") from error
        tokens = round(question.workload.prompt_mean)
        lines.append(f"{name}: {judge(name, link, prefill.prefill, tokens).verdict}.")
    return lines


def _plot(answer: Plan) -> str:
    from kvxfer.serving.planner import router_of
    from kvxfer.serving.report import curve_svg
    from kvxfer.serving.sim import simulate

    question = answer.question
    curves = {}
    for candidate in answer.candidates:
        if candidate.simulated is None or not candidate.simulated.rate:
            continue
        curve = []
        for part in CURVE:
            load = question.workload.at_rate(candidate.simulated.rate * part)
            result = simulate(candidate.fleet, load, router_of(question)())
            curve.append(
                (result.output_rate, result.percentile(lambda one: one.last - one.arrived, 90))
            )
        curves[candidate.fleet.name] = curve
    if not curves:
        raise InvalidError(f"nothing to plot: {answer.infeasible}")
    return curve_svg(curves, "output tokens/s", "p90 of the time to the last token, s")


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvxfer plan fit``."""
    parser.add_argument(
        "log", nargs="?", help="vLLM request log, or a result of vllm bench with its details"
    )
    parser.add_argument("--batch-tokens", type=int, required=True, help="max_num_batched_tokens")
    parser.add_argument("--first", type=int, help="of a log: fit only to the first requests")
    parser.add_argument(
        "--engines", type=int, default=1, help="of a log: data parallel ranks behind it"
    )
    parser.add_argument(
        "--metrics",
        action="append",
        default=[],
        metavar="URL",
        help="of a vLLM engine under load, instead of a log; may be repeated for equal ones",
    )
    parser.add_argument("--interval", type=float, default=10.0, help="of metrics: seconds")
    parser.add_argument("--count", type=int, default=30, help="of metrics: looks at each engine")


def run_fit(
    options: argparse.Namespace,
    sleep: Callable[[float], None] = time.sleep,
    fetch: Fetch | None = None,
) -> int:
    """Fit and print costs as a setup has them; return the exit status."""
    from kvxfer.serving import live
    from kvxfer.serving.fit import fit
    from kvxfer.serving.metered import Meter, fit_metered
    from kvxfer.serving.traces import read_served

    if (options.log is None) == (not options.metrics):
        raise InvalidError("give either a log, or engines with --metrics")
    costs: Costs | Metered
    if options.log is not None:
        costs = fit(read_served(options.log), options.batch_tokens, options.first, options.engines)
    else:
        positive("--interval", options.interval)
        meters = [Meter(url, fetch or live.fetch) for url in options.metrics]
        looks = [meter.look() for meter in meters]
        for _ in range(options.count):
            sleep(options.interval)
            looks += [meter.look() for meter in meters]
        costs = fit_metered([look for look in looks if look is not None], options.batch_tokens)
    found = {
        name: dataclasses.asdict(cost)
        for name, cost in (("prefill", costs.prefill), ("decode", costs.decode))
        if cost is not None
    }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    sys.stderr.write(f"mean error of the fitted durations: {costs.error:.1%}\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given[:1] in (["fit"], ["watch"]) else ""
    parser = manual(f"kvxfer plan {name}".strip(), **_MANUALS[name])
    add, start = add_arguments, run
    if name == "fit":
        add, start = add_fit_arguments, run_fit
    elif name == "watch":
        from kvxfer.serving import watch_command

        add, start = watch_command.add_arguments, watch_command.run
    add(parser)
    options = parser.parse_args(given[1:] if name else given)
    try:
        return start(options)
    except InvalidError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return 1
