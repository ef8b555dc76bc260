"""`python -m eyas ...`: thin. Each command parses, calls one function of the library, prints, and returns an exit code."""

import argparse
import os
import select
import shlex
import sys
from pathlib import Path

from eyas.errors import EyasError, takes_settings
from eyas.files import RUN_PARTS
from eyas.models.layer_ids import ENGINES

EXIT_BROKEN_PIPE = 141  # what a shell gives for a program that SIGPIPE ended


def _config(args):
    from eyas.config import Config

    return Config.load(args.profile, **dict(args.p or []))


def _with_profile(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--profile",
        default="demo",
        help="name under notebooks/profiles, or a YAML file (default: demo)",
    )
    parser.add_argument(
        "-p",
        nargs=2,
        action="append",
        metavar=("NAME", "VALUE"),
        help="override one setting of the profile",
    )
    return parser


def _at_least_0(kind: type):
    """Return a function that reads a number of this kind that is not negative."""

    def number(text: str):
        value = kind(text)
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not 0 or more")
        return value

    return number


def _profile(args) -> int:
    print(_config(args))
    return 0


def _server(args) -> int:
    import json

    from eyas.server import serve

    config = _config(args)
    if args.action == "command":
        print(serve.command_text(config, args.blocks))
        return 0
    if args.action == "up":
        server = serve.server_up(config, owner="hand")
        print(f"up: {server.url} (pid {server.pid}), log {serve.shown(server.log)}")
        return 0
    if args.action == "down":
        server = serve.find_server(config)
        if server is not None:
            server.down()
        print(
            f"run {config.run_name}: "
            + (
                "no server was up"
                if server is None
                else "not ours, left running"
                if not server.pid
                else "down"
            )
        )
        return 0
    server = serve.need_server(config)
    if args.action == "wait":
        server.wait(config.server_timeout_s)
        print(f"ready: {server.url}")
    else:
        print(json.dumps(server.status(), indent=2))
    return 0


def _prompts_build(args) -> int:
    from eyas.files import ROOT
    from eyas.prompts.build import build_file

    print(
        build_file(args.path or ROOT / "data_manifests" / "eyas_chat.jsonl", args.seed, args.more)
    )
    return 0


def _prompts_import(args) -> int:
    from eyas.prompts.prompt_set import import_file

    print(import_file(args.file, args.path, args.heldout_share, args.seed))
    return 0


def _prompts_show(args) -> int:
    from eyas.prompts.prompt_set import load_prompts, show

    print(show(load_prompts(_config(args).prompt_path)))
    return 0


def _prompts_generate(args) -> int:
    from eyas.models.target import target_of
    from eyas.progress import Progress
    from eyas.prompts.prompt_set import load_prompts
    from eyas.prompts.responses import generate_responses
    from eyas.server.serve import need_server

    config = _config(args)
    if (
        not config.generate_responses
        and not config.prompt_path.is_file()
        and "*" in config.prompt_path.name
    ):
        raise EyasError(
            f"prompt_set {config.prompt_set!r} names several files",
            "the one to write responses into",
            "python -m eyas prompts generate -p prompt_set FILE.jsonl",
        )
    conversations = load_prompts(config.prompt_path).conversations
    server, target = need_server(config), target_of(config)
    with Progress(len(conversations), "conversations") as progress:
        manifest = generate_responses(
            server.url,
            target,
            conversations,
            config.max_new_tok,
            config.concurrency,
            config.answered_path,
            progress,
        )
    responses = manifest["responses"]
    print(
        f"{config.answered_path.name}: {responses['total']} responses of {responses['mean_tok']:.1f} tokens in {manifest['conversations']['total']} conversations; "
        f"ended {responses['finish']}; repeated bigrams {responses['repeated_bigrams']['share']:.3f}"
    )
    return 0


def _report(args) -> int:
    from eyas.files import read_json
    from eyas.report import run as report

    names = tuple(n for n in _config(args).notebooks.split() if n >= (args.start or ""))
    if not names:
        raise EyasError(
            f"the profile runs no notebook from {args.start} on",
            f"a number among {_config(args).notebooks}",
            f"python -m eyas report -p notebooks {args.start}",
        )
    folder = report.run_report(
        args.profile,
        dict(args.p or []),
        names,
        reports=args.out or report.REPORTS,
        cell_timeout_s=args.cell_timeout_s,
        again=args.all or bool(args.start),
    )
    run = read_json(folder / "run.json")
    print(
        f"{run['state']}: {folder.parent / 'index.html'}"
        + ("; the same command goes on from here" if run["state"] == "interrupted" else "")
    )
    return run["return_code"]


def _job(args) -> int:
    from eyas import jobs

    if args.action == "list":
        print(jobs.table(jobs.list_jobs()))
        return 0
    config = _config(args)
    if args.action == "start":
        job = jobs.start(config, args.name)
        print(
            f"{job} goes on in the background; next: python -m eyas job follow {args.name} -p run_name {config.run_name}"
        )
        return 0
    found = [jobs.find_job(config, args.name)] if args.name else jobs.list_jobs(config.run_name)
    if args.action == "stop":
        print(
            "\n".join(
                f"{job}: "
                + (
                    "stopped; the same again goes on where it was"
                    if jobs.stop(job)
                    else f"not going on ({job.state})"
                )
                for job in found
            )
            or "no jobs"
        )
        return 0
    for job in [job for job in found if args.name or job.state == "running"]:
        jobs.follow(job)
    print(jobs.table(found))
    return max((job.end()["code"] for job in found if job.state == "done"), default=0)


def _index(args) -> int:
    from eyas.report import run as report

    print(report.write_index(args.out or report.REPORTS))
    return 0


def _summary(args) -> int:
    from eyas.report import run as report
    from eyas.report import summary

    print(summary.markdown(report.read_report(args.run_name, args.out or report.REPORTS)), end="")
    return 0


def _doctor(args) -> int:
    from eyas.doctor import doctor, screen, target_doctor

    if args.target:
        checks, table = target_doctor(args.target)
        print(
            screen(
                checks,
                f"This target is supported; next: python -m eyas plan -p target {args.target}",
            )
        )
        print(table)
    else:
        checks = doctor()
        print(screen(checks))
    return 1 if any(check.ok is False for check in checks) else 0


def _target(args) -> int:
    from eyas.models.target import target_of

    print(target_of(_config(args)))
    return 0


def _extract(args) -> int:
    from eyas.capture.extract import extract
    from eyas.models.target import target_of
    from eyas.prompts.prompt_set import load_prompts
    from eyas.server.serve import need_servers

    config = _config(args)
    summary = extract(
        config,
        need_servers(config),
        target_of(config),
        load_prompts(config.answered_path),
        args.retry_failed,
        args.anyway,
    )
    print(summary)
    return 1 if summary.failed else 0


def _plan(args) -> int:
    from eyas.capture.plan import Known, make_plan

    known = Known(args.tok, args.samples, args.hidden_size, args.blocks, args.tok_per_s)
    print(make_plan(_config(args), known))
    return 0


def _data(args) -> int:
    from eyas import data_folder

    if args.action == "list":
        runs = data_folder.list_runs()
        print(runs.to_string(index=False) if len(runs) else "no runs yet")
        return 0
    removal = data_folder.look(args.run_name, RUN_PARTS if args.part == "all" else (args.part,))
    print(
        f"{removal}"
        + (
            f"; the drafter of run {', '.join(removal.named_by)} was trained from it"
            if removal.named_by
            else ""
        )
    )
    if not args.yes:
        print(
            f"nothing removed yet; the same command with --yes{' --force' if removal.named_by else ''} removes it"
        )
        return 0
    data_folder.remove(removal, args.force)
    print("removed")
    return 0


def _verify(args) -> int:
    from eyas.capture.extract import extract
    from eyas.capture.verify import repair, verify
    from eyas.models.target import target_of
    from eyas.prompts.prompt_set import chosen, load_prompts
    from eyas.server.serve import need_servers
    from eyas.store.reader import Store

    config = _config(args)
    target, prompts = target_of(config), load_prompts(config.answered_path)
    report = verify(
        config.store_dir, prompts, target.tokenizer(), deep=not args.quick, head=target.head()
    )
    print(report)
    if report.foreign or not (report.ok or args.repair):
        print(
            "next: the same command with "
            + (
                "the profile and settings that the store was made with"
                if report.foreign
                else "--repair"
            )
        )
        return 1
    for _ in range(3):  # with the index in order, what is wrong with the samples shows
        if report.ok:
            break
        print("\n".join(repair(config.store_dir, report)))
        if Store.open(config.store_dir).manifest["prompts"]["hash"] is None:
            print(
                "an imported store; next: the same python -m eyas store import again brings back just these"
            )
            return 1
        print(extract(config, need_servers(config), target, prompts))
        report = verify(config.store_dir, prompts, target.tokenizer(), head=target.head())
        print(report)
    store = Store.open(config.store_dir)
    if not report.ok or store.manifest["prompts"]["hash"] is None:
        return 0 if report.ok else 1
    asked = {c.id for c in chosen(config, prompts)}
    there = len(asked & set(store.samples()))
    print(
        f"complete: {there} of {len(asked)} samples that the profile asks for"
        + (
            ""
            if there == len(asked)
            else "; next: python -m eyas extract, which says why the others are not there"
        )
    )
    return 0 if there == len(asked) else 1


def _parity(args) -> int:
    from eyas.models.target import target_of
    from eyas.parity.certify import certify, summary
    from eyas.prompts.prompt_set import load_prompts
    from eyas.server.serve import need_servers
    from eyas.store.reader import Store

    config = _config(args)
    store = Store.open(config.store_dir)
    prompts = (
        load_prompts(config.answered_path) if store.manifest["prompts"]["hash"] else None
    )  # an imported store has none
    record = certify(
        config, need_servers(config)[0], store, target_of(config), prompts, full=args.full
    )
    print(summary(record))
    return 0 if record["passed"] else 1


def _store_export(args) -> int:
    from eyas.models.boundaries import drafter_boundaries
    from eyas.store.formats.exporting import export_store
    from eyas.store.reader import Store

    config = _config(args)
    store = Store.open(config.store_dir)
    feeding = drafter_boundaries(config, store.boundaries[-1]).feeding
    print(export_store(store, args.format, args.out, feeding, args.split))
    return 0


def _store_import(args) -> int:
    from eyas.models.target import target_of
    from eyas.store.formats.importing import import_store

    config = _config(args)
    imported = import_store(
        config, target_of(config), args.format, args.source, args.norm, args.heldout_every
    )
    print(imported)
    stored = {split: len(imported.store.samples(split)) for split in ("train", "heldout")}
    if stored["train"] > config.train_samples or stored["heldout"] > config.heldout_samples:
        print(
            f"train_samples {config.train_samples:,} and heldout_samples {config.heldout_samples:,} leave some of them out of a training; "
            f"all of them: python -m eyas train -p train_samples {stored['train']} -p heldout_samples {stored['heldout']}"
        )
    return 1 if imported.failed else 0


def _train(args) -> int:
    from eyas.models.target import target_of
    from eyas.store.reader import Store
    from eyas.training import distributed
    from eyas.training.trainer import summary, train

    config = _config(args)
    train(config, Store.open(config.store_dir), target_of(config))
    if distributed.RANK == 0:
        print(summary(config))
    return 0


def _sweep(args) -> int:
    from eyas.models.target import target_of
    from eyas.store.reader import Store
    from eyas.studies.boundaries import run_study, summary

    config = _config(args)
    study = run_study(config, Store.open(config.store_dir), target_of(config))
    print(summary(study))
    return 1 if study.record["failed"] else 0


def _tune(args) -> int:
    from eyas.models.target import target_of
    from eyas.prompts.prompt_set import load_prompts
    from eyas.studies.server_settings import summary, tune, tuned_profile

    config = _config(args)
    result = tune(config, target_of(config), load_prompts(config.answered_path))
    print(summary(result))
    if result["helped"]:
        print(f"kept as a profile: --profile {tuned_profile(config)}")
    return 0


def _walk(args) -> int:
    from eyas.evaluation.offline import run_walk, summary
    from eyas.models.drafter import load_drafter
    from eyas.models.target import target_of
    from eyas.store.reader import Store

    config = _config(args)
    store = Store.open(config.judged_store_dir)
    print(
        summary(
            run_walk(
                config,
                load_drafter(config.judged.drafter_dir, target_of(config), config.drafter_file),
                store,
            )
        )
    )
    return 0


def _decode(args) -> int:
    from eyas.evaluation.acceptance import eval_prompts, measure
    from eyas.evaluation.speed import model_speed, speed_text
    from eyas.models.drafter import load_drafter
    from eyas.models.target import target_of

    config = _config(args)
    target = target_of(config)
    prompts, drafter = (
        eval_prompts(config, target),
        load_drafter(config.judged.drafter_dir, target, config.drafter_file),
    )
    acceptance = measure(config, target, drafter, prompts)
    print(acceptance)
    print(speed_text(model_speed(config, target, drafter, prompts, acceptance)))
    return 0


def _compare(args) -> int:
    from eyas.evaluation.acceptance import compare_runs, comparison_text

    print(comparison_text(compare_runs(_config(args))))
    return 0


def _export(args) -> int:
    from eyas.models.layer_ids import SGLANG, round_trip, round_trip_text

    if args.table:
        print(
            f"A target of {args.blocks} blocks (--blocks N):\n"
            + round_trip_text(round_trip(args.blocks))
        )
        return 0
    from eyas.models.drafter import load_drafter
    from eyas.models.export import export_sglang, export_speculators, made_from
    from eyas.models.target import target_of
    from eyas.training.trainer import weights_text

    config = _config(args)
    target = target_of(config)
    drafter = load_drafter(config.drafter_dir, target, config.drafter_file)
    if said := weights_text(config):
        print(said)
    if args.to == "sglang":
        folder = export_sglang(drafter, target, config.export_dir, made_from=made_from(config))
        print(
            f"for {SGLANG.replace('sglang', 'SGLang')}, with the draft settings of the profile:\n{_sglang_line(config, target.folder, folder)}"
        )
        if drafter.config.norm_output:
            print(
                "it feeds back the drafter's normed output (norm_output in config.json), which this SGLang does; one that does not know it accepts less from the second draft on"
            )
        return 0
    folder = export_speculators(
        drafter,
        target,
        config.export_dir / "vllm",
        config.speculative_num_steps,
        args.to,
        made_from(config),
    )
    print(
        f"for vLLM and speculators, with the draft settings of the profile:\n{_vllm_line(config, target.folder, folder)}\nvLLM was never run here"
        + (
            "; it has to know norm_output of config.json, or it accepts less from the second draft on"
            if drafter.config.norm_output
            else ""
        )
    )
    return 0


def _sglang_line(config, model: Path, folder: Path) -> str:
    """What serves the export, as `decode` judged it: of what is not said SGLang chooses its own, for a Llama a tree of 8 tokens. Address, memory and the like are the server's own affair."""
    words = [
        "python",
        "-m",
        "sglang.launch_server",
        "--model-path",
        model,
        "--dtype",
        config.dtype,
        *["--tp-size", config.tensor_parallel] * (config.tensor_parallel > 1),
        *["--trust-remote-code"] * config.trust_remote_code,
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        folder,
        "--speculative-num-steps",
        config.speculative_num_steps,
        "--speculative-eagle-topk",
        config.speculative_eagle_topk,
        "--speculative-num-draft-tokens",
        config.verified_tok,
        *["--speculative-use-rejection-sampling"] * config.speculative_use_rejection_sampling,
    ]
    return shlex.join(map(str, words))


def _vllm_line(config, model: Path, folder: Path) -> str:
    """The same for vLLM, which drafts chains; it names the target itself, since the one in the export's config.json is a folder of this machine."""
    import json

    speculative = json.dumps(
        {
            "method": "eagle3",
            "model": str(folder),
            "num_speculative_tokens": config.speculative_num_steps,
        }
    )
    words = [
        "vllm",
        "serve",
        model,
        "--dtype",
        config.dtype,
        *["--tensor-parallel-size", config.tensor_parallel] * (config.tensor_parallel > 1),
        *["--trust-remote-code"] * config.trust_remote_code,
        "--speculative-config",
        speculative,
    ]
    return shlex.join(map(str, words))


def _import_drafter(args) -> int:
    from eyas.models.import_drafter import import_drafter
    from eyas.models.target import target_of

    config = _config(args)
    given = config.boundaries if any(name == "boundaries" for name, _ in args.p or []) else ()
    residual = {"yes": True, "no": False, None: None}[args.norm_before_residual]
    print(
        import_drafter(
            args.folder, target_of(config), config.drafter_dir, args.ids_of or "", given, residual
        )
    )
    print(
        f"next: python -m eyas decode -p drafter_run {config.run_name}, with the profile of a run whose prompts are to judge it; its own results stay, and compare -p drafter_run "
        f"{config.run_name} -p compare_run THAT_RUN tells the two drafters apart\nwithout such a run: python -m eyas decode -p run_name {config.run_name} -p eval_set FILE.jsonl, or humaneval"
    )
    return 0


def _serve_check(args) -> int:
    from eyas.evaluation.acceptance import eval_prompts
    from eyas.evaluation.served import check
    from eyas.models.drafter import load_drafter
    from eyas.models.target import target_of

    config = _config(args)
    target = target_of(config)
    found = check(
        config,
        target,
        load_drafter(config.judged.drafter_dir, target, config.drafter_file),
        eval_prompts(config, target),
    )
    print(found)
    return 0 if found.passed else 1


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eyas",
        description="EAGLE-3 drafters from the hidden states that a real SGLang server computes",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    profile = _with_profile(
        commands.add_parser("profile", help="print every setting of a profile, with its meaning")
    )
    profile.add_argument("--explain", action="store_true", help="the same; named in error messages")
    profile.set_defaults(run=_profile)

    doctor = commands.add_parser(
        "doctor", help="is everything here, do the plugins apply, and what to type where not"
    )
    doctor.add_argument(
        "--target",
        metavar="FOLDER",
        help="ask instead whether this target is supported; a folder with its config.json is enough",
    )
    doctor.set_defaults(run=_doctor)

    _with_profile(
        commands.add_parser(
            "target", help="the target's facts; makes the embedded one when it is not there"
        )
    ).set_defaults(run=_target)

    server = commands.add_parser(
        "server", help="start, wait for, inspect or stop the run's SGLang server"
    )
    server.add_argument(
        "action",
        choices=("up", "wait", "status", "down", "command"),
        help="command: print what `up` would start, with its variables, and start nothing",
    )
    server.add_argument(
        "--blocks",
        type=int,
        default=0,
        metavar="N",
        help="command: number of blocks of a target that is not on this machine",
    )
    _with_profile(server).set_defaults(run=_server)

    _with_profile(
        commands.add_parser(
            "tune",
            help="try server settings against the profile's own, side by side, within tune_minutes; keeps what is confirmed as a profile; goes on where it was",
        )
    ).set_defaults(run=_tune)

    prompts = commands.add_parser(
        "prompts", help="build, show or answer the prompt set"
    ).add_subparsers(dest="action", required=True, metavar="ACTION")
    build = prompts.add_parser("build", help="write our own prompt set, user turns only")
    build.add_argument("--path", help="where to (default: data_manifests/eyas_chat.jsonl)")
    build.add_argument("--seed", type=int, default=0)
    build.add_argument(
        "--more",
        type=int,
        default=0,
        metavar="N",
        help="N conversations of each topic that are not in the set, to add to it",
    )
    build.set_defaults(run=_prompts_build)
    bring = prompts.add_parser(
        "import",
        help="turn conversations in ShareGPT's or OpenAI's form, JSON or JSONL, into a prompt set",
    )
    bring.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help='rows with "conversations" of {"from", "value"}, or "messages" of {"role", "content"}',
    )
    bring.add_argument(
        "--path",
        type=Path,
        required=True,
        metavar="OUT",
        help="where the prompt set goes; a file that is there stays",
    )
    bring.add_argument(
        "--heldout-share",
        type=float,
        default=0.05,
        help="share of the conversations that is held out (default: 0.05)",
    )
    bring.add_argument("--seed", type=int, default=0, help="draws the held-out ones")
    bring.set_defaults(run=_prompts_import)
    show = _with_profile(
        prompts.add_parser("show", help="print a few conversations of each category")
    )
    show.set_defaults(run=_prompts_show)
    generate = _with_profile(
        prompts.add_parser(
            "generate",
            help="have the run's server write the target's own responses; goes on where it was",
        )
    )
    generate.set_defaults(run=_prompts_generate)

    plan = _with_profile(
        commands.add_parser("plan", help="bytes, files and time of an extraction, without a server")
    )
    for option, kind, what in (
        ("--tok", int, "tokens of all samples"),
        ("--samples", int, "number of samples"),
        ("--hidden-size", int, "hidden size of the target"),
        ("--blocks", int, "number of blocks of the target"),
        ("--tok-per-s", float, "rate of extraction, tokens per second"),
    ):
        plan.add_argument(
            option,
            type=_at_least_0(kind),
            default=0,
            metavar="N",
            help=f"{what}, where it cannot be counted here",
        )
    plan.set_defaults(run=_plan)

    extract = _with_profile(
        commands.add_parser(
            "extract",
            help="hidden states of the profile's samples into its store; goes on where it was",
        )
    )
    extract.add_argument(
        "--retry-failed",
        action="store_true",
        help="try samples again that failed by a fault of their own",
    )
    extract.add_argument(
        "--anyway", action="store_true", help="start though the disk looks too small"
    )
    extract.set_defaults(run=_extract)

    verify = _with_profile(
        commands.add_parser("verify", help="read a store back: complete, whole, the prompt set's")
    )
    depth = verify.add_mutually_exclusive_group()
    depth.add_argument("--deep", action="store_true", help="read every byte (the default)")
    depth.add_argument("--quick", action="store_true", help="sizes and headers only")
    verify.add_argument(
        "--repair",
        action="store_true",
        help="put right what can be, and extract again just what is broken (needs the server)",
    )
    verify.set_defaults(run=_verify)

    data = commands.add_parser(
        "data", help="what lies in the data folder, and removing it"
    ).add_subparsers(dest="action", metavar="ACTION")
    data.add_parser("list", help="runs, their parts and sizes")
    remove = data.add_parser("rm", help="say what would go; --yes removes it")
    remove.add_argument("run_name", metavar="RUN")
    remove.add_argument(
        "--part",
        default="store",
        choices=(*RUN_PARTS, "all"),
        help="what of the run (default: its store)",
    )
    remove.add_argument("--yes", action="store_true", help="really remove it")
    remove.add_argument(
        "--force", action="store_true", help="also a store that a drafter was trained from"
    )
    commands.choices["data"].set_defaults(run=_data, action="list")

    formats = ("speculators-v1", "speculators", "specforge")
    store = commands.add_parser(
        "store", help="a store as files of other projects, and back"
    ).add_subparsers(dest="action", required=True, metavar="ACTION")
    out = _with_profile(
        store.add_parser("export", help="the run's store as files of another project")
    )
    out.add_argument(
        "--to",
        dest="format",
        required=True,
        choices=formats,
        help="speculators-v1: speculators 0.3 and 0.4",
    )
    out.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="an empty one, or one that is not there yet",
    )
    out.add_argument(
        "--split", choices=("train", "heldout"), help="these samples only (default: all)"
    )
    out.set_defaults(run=_store_export)
    into = _with_profile(
        store.add_parser(
            "import", help="a store for the run from files of another project; goes on where it was"
        )
    )
    into.add_argument("--from", dest="format", required=True, choices=formats)
    into.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="their folder; -p target and -p boundaries say what it was made from",
    )
    into.add_argument(
        "--norm",
        choices=("pre", "post"),
        help="last states stand before or after the final norm (default: as the format has them, and checked)",
    )
    into.add_argument(
        "--heldout-every",
        type=int,
        default=20,
        metavar="N",
        help="hold out the first of every N samples (default: 20; 0: none)",
    )
    into.set_defaults(run=_store_import)

    parity = _with_profile(
        commands.add_parser(
            "parity",
            help="compare samples of the store with independent references, and certify it for training",
        )
    )
    parity.add_argument(
        "--full",
        action="store_true",
        help="also against a second server with prefix cache and chunked prefill",
    )
    parity.set_defaults(run=_parity)

    _with_profile(
        commands.add_parser(
            "train", help="train the run's drafter from its store; goes on where it was"
        )
    ).set_defaults(run=_train)

    _with_profile(
        commands.add_parser(
            "sweep",
            help="train drafters fed from many choices of boundaries, in parallel, and compare them; goes on where it was",
        )
    ).set_defaults(run=_sweep)

    _with_profile(
        commands.add_parser(
            "walk", help="estimate the drafter's acceptance from the stored held-out states"
        )
    ).set_defaults(run=_walk)
    _with_profile(
        commands.add_parser(
            "decode",
            help="real speculative decoding of held-out prompts: acceptance, speed, same output",
        )
    ).set_defaults(run=_decode)
    _with_profile(
        commands.add_parser(
            "compare",
            help="acceptance of the run's drafter minus that of -p compare_run NAME, paired by prompt",
        )
    ).set_defaults(run=_compare)
    _with_profile(
        commands.add_parser(
            "serve-check",
            help="serve the drafter in SGLang: does the server accept what `decode` does, on the same prompts?",
        )
    ).set_defaults(run=_serve_check)

    export = _with_profile(
        commands.add_parser(
            "export", help="write the run's drafter in the layout that SGLang serves, or vLLM"
        )
    )
    export.add_argument(
        "--to",
        default="sglang",
        choices=("sglang", "vllm", "speculators"),
        help="default: sglang; the other two read the same files",
    )
    export.add_argument(
        "--table",
        action="store_true",
        help="write nothing; show what each engine, version and family means by a layer id",
    )
    export.add_argument(
        "--blocks",
        type=int,
        default=30,
        metavar="N",
        help="blocks of the target in that table (default: 30)",
    )
    export.set_defaults(run=_export)
    foreign = _with_profile(
        commands.add_parser(
            "import-drafter",
            help="a drafter that others trained as the drafter of run_name, to judge it",
        )
    )
    foreign.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint in SGLang's, SpecForge's or speculators' layout",
    )
    foreign.add_argument(
        "--ids-of",
        choices=ENGINES,
        metavar="ENGINE",
        help=f"whose layer ids are in it: {', '.join(ENGINES)} (default: the layout's own engine); or -p boundaries says what feeds it",
    )
    foreign.add_argument(
        "--norm-before-residual",
        choices=("yes", "no"),
        help="where a checkpoint in speculators' layout doesn't say",
    )
    foreign.set_defaults(run=_import_drafter)

    job = commands.add_parser(
        "job", help="long jobs in the background, as the notebooks start them"
    ).add_subparsers(dest="action", metavar="ACTION")
    job.add_parser("list", help="all of them, with how far they are")
    begin = _with_profile(
        job.add_parser("start", help="in the background; goes on when this terminal closes")
    )
    begin.add_argument("name", metavar="COMMAND", help="extract, train or sweep")
    for action, text in (
        ("follow", "show what it prints and how far it is; Ctrl-C ends the watching only"),
        ("stop", "end it as Ctrl-C would; the same again goes on where it was"),
    ):
        one = _with_profile(job.add_parser(action, help=text))
        one.add_argument(
            "name",
            metavar="COMMAND",
            nargs="?",
            help="extract, train or sweep (default: all of the run)",
        )
    commands.choices["job"].set_defaults(run=_job, action="list")

    report = _with_profile(
        commands.add_parser(
            "report",
            help="run the notebooks that are not up to date, and write the pages and the index",
        )
    )
    report.add_argument(
        "--from",
        dest="start",
        metavar="NN",
        help="run this notebook, e.g. 04, and all after it, up to date or not; pages of the ones before it stay",
    )
    report.add_argument("--all", action="store_true", help="run all of them, up to date or not")
    report.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the pages go (default: reports/)"
    )
    report.add_argument(
        "--cell-timeout-s",
        type=float,
        default=4 * 3600.0,
        metavar="S",
        help="longest time of one cell, seconds (default: four hours)",
    )
    report.set_defaults(run=_report)

    index = commands.add_parser(
        "index",
        help="write the index of all reports, their links and their summaries again, from what is there; runs nothing",
    )
    index.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the reports are (default: reports/)"
    )
    index.set_defaults(run=_index)
    told = commands.add_parser(
        "summary",
        help="one report as Markdown for an issue or a chat: answer, numbers with intervals, command, versions",
    )
    told.add_argument("run_name", metavar="RUN", help="a folder of the reports")
    told.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the reports are (default: reports/)"
    )
    told.set_defaults(run=_summary)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        _say_without_effect(args)
        code = args.run(args)
        sys.stdout.flush()  # here, where a reader that has gone away can still be told from an error
        return code
    except EyasError as error:
        print(f"eyas: {error}{_as_here(args, error.next_command)}", file=sys.stderr)
        return 2
    except BrokenPipeError as error:
        if _nobody_reads():
            return EXIT_BROKEN_PIPE
        print(f"eyas: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a disk, a permission, a name that is too long: nothing that a traceback would explain
        print(f"eyas: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eyas: interrupted", file=sys.stderr)
        return 130


def _say_without_effect(args) -> None:
    """Say on stderr which settings that came with -p this command does not read."""
    names = [name for name, _ in getattr(args, "p", None) or []]
    if not names or os.environ.get("RANK", "0") != "0":  # under torchrun one process says it
        return
    from eyas.effects import without_effect

    action, job = getattr(args, "action", None), getattr(args, "name", None)
    command = (
        job
        if args.command == "job" and action == "start"
        else " ".join(filter(None, (args.command, action)))
    )
    if said := without_effect(command, names, _config(args)):
        print(f"note: {said}", file=sys.stderr)


def _nobody_reads() -> bool:
    """Whether it is our own output that has lost its reader: `| head` has seen enough. Nothing more is written then, or Python would complain at its end."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors and hang-ups are reported unasked
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _as_here(args, next_command: str) -> str:
    """A command that a message names is for the run at hand: with these options, but for what the message says itself."""
    options = (
        ["--profile", args.profile]
        if getattr(args, "profile", "demo") != "demo" and "--profile" not in next_command
        else []
    )
    options += [
        word
        for name, value in getattr(args, "p", None) or []
        if f"-p {name} " not in next_command
        for word in ("-p", name, value)
    ]
    return (
        f", with {shlex.join(options)} as here" if options and takes_settings(next_command) else ""
    )


if __name__ == "__main__":
    raise SystemExit(main())
