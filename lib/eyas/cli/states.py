"""Commands from prompts to a certified store: server, prompts, extract, verify, parity, data."""

from pathlib import Path

from eyas.cli.options import add_command, add_group, at_least_0, config_of
from eyas.errors import EyasError
from eyas.files import RUN_PARTS

FORMATS = ("speculators-v1", "speculators", "specforge")
REPAIR_ROUNDS = 3


# ---- server


def declare_server(commands) -> None:
    server = add_group(
        commands, "server", "run the target's SGLang server: up, wait, status, down, command"
    )
    add_command(server, "up", server_up, "start the run's server and wait until it is ready")
    add_command(server, "wait", server_wait, "wait until the run's server is ready")
    add_command(server, "status", server_status, "print what the run's server says of itself")
    add_command(server, "down", server_down, "stop the run's server")
    command = add_command(
        server,
        "command",
        server_command,
        "print the command and variables that `up` would use, and start nothing",
    )
    command.add_argument(
        "--blocks",
        type=at_least_0(int),
        default=0,
        metavar="N",
        help="number of blocks of a target that is not on this machine",
    )


def server_up(args) -> int:
    from eyas.server import serve

    server = serve.server_up(config_of(args), owner="hand")
    print(f"up: {server.url} (pid {server.pid}), log {serve.shown(server.log)}")
    return 0


def server_wait(args) -> int:
    from eyas.server import serve

    config = config_of(args)
    server = serve.need_server(config)
    server.wait(config.server_timeout_s)
    print(f"ready: {server.url}")
    return 0


def server_status(args) -> int:
    import json

    from eyas.server import serve

    print(json.dumps(serve.need_server(config_of(args)).status(), indent=2))
    return 0


def server_down(args) -> int:
    from eyas.server import serve

    config = config_of(args)
    server = serve.find_server(config)
    if server is None:
        outcome = "no server was up"
    else:
        server.down()
        outcome = "down" if server.pid else "not ours, left running"
    print(f"run {config.run_name}: {outcome}")
    return 0


def server_command(args) -> int:
    from eyas.server import serve

    print(serve.command_text(config_of(args), args.blocks))
    return 0


# ---- prompts


def declare_prompts(commands) -> None:
    prompts = add_group(commands, "prompts", "prepare conversations: build, import, show, generate")
    _declare_prompts_build(prompts)
    _declare_prompts_import(prompts)
    add_command(prompts, "show", prompts_show, "print a few conversations of each category")
    add_command(
        prompts,
        "generate",
        prompts_generate,
        "have the run's server write the target's own responses; the same command resumes",
    )


def _declare_prompts_build(prompts) -> None:
    build = add_command(
        prompts,
        "build",
        prompts_build,
        "write this project's prompt set, user turns only",
        profile=False,
    )
    build.add_argument("--path", help="the file to write (default: data_manifests/eyas_chat.jsonl)")
    build.add_argument("--seed", type=int, default=0, help="draws the conversations (default: 0)")
    build.add_argument(
        "--more",
        type=int,
        default=0,
        metavar="N",
        help="write instead N conversations of each topic that the set does not have yet",
    )


def prompts_build(args) -> int:
    from eyas.files import ROOT
    from eyas.prompts.build import build_file

    path = args.path or ROOT / "data_manifests" / "eyas_chat.jsonl"
    print(build_file(path, args.seed, args.more))
    return 0


def _declare_prompts_import(prompts) -> None:
    parser = add_command(
        prompts,
        "import",
        prompts_import,
        "turn conversations in ShareGPT's or OpenAI's form, JSON or JSONL, into a prompt set",
        profile=False,
    )
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help='rows with "conversations" of {"from", "value"}, or "messages" of {"role", "content"}',
    )
    parser.add_argument(
        "--path",
        type=Path,
        required=True,
        metavar="OUT",
        help="the prompt set to write; a file that exists is kept",
    )
    parser.add_argument(
        "--heldout-share",
        type=float,
        default=0.05,
        help="share of the conversations that is held out (default: 0.05)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="draws the held-out conversations (default: 0)"
    )


def prompts_import(args) -> int:
    from eyas.prompts.prompt_set import import_file

    print(import_file(args.file, args.path, args.heldout_share, args.seed))
    return 0


def prompts_show(args) -> int:
    from eyas.prompts.prompt_set import load_prompts, show

    print(show(load_prompts(config_of(args).prompt_path)))
    return 0


def prompts_generate(args) -> int:
    from eyas.models.target import target_of
    from eyas.progress import Progress
    from eyas.prompts.prompt_set import load_prompts
    from eyas.prompts.responses import generate_responses
    from eyas.server.serve import need_server

    config = config_of(args)
    several = not config.prompt_path.is_file() and "*" in config.prompt_path.name
    if several and not config.generate_responses:
        raise EyasError(
            f"prompt_set {config.prompt_set!r} names several files",
            "the one to write responses into",
            "python -m eyas prompts generate -p prompt_set FILE.jsonl",
        )
    conversations = load_prompts(config.prompt_path).conversations
    server = need_server(config)
    target = target_of(config)
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
        f"{config.answered_path.name}: {responses['total']} responses of "
        f"{responses['mean_tok']:.1f} tokens in {manifest['conversations']['total']} "
        f"conversations; ended {responses['finish']}; "
        f"repeated bigrams {responses['repeated_bigrams']['share']:.3f}"
    )
    return 0


# ---- extract, verify, parity


def declare_extract(commands) -> None:
    parser = add_command(
        commands,
        "extract",
        run_extract,
        "write hidden states into the run's store; the same command resumes",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="try samples again that failed through a fault of their own",
    )
    parser.add_argument(
        "--anyway", action="store_true", help="start even though the disk looks too small"
    )


def run_extract(args) -> int:
    from eyas.capture.extract import extract
    from eyas.models.target import target_of
    from eyas.prompts.prompt_set import load_prompts
    from eyas.server.serve import need_servers

    config = config_of(args)
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


def declare_verify(commands) -> None:
    parser = add_command(
        commands, "verify", run_verify, "check that the run's store is complete and undamaged"
    )
    parser.add_argument(
        "--quick", action="store_true", help="read sizes and headers only (default: every byte)"
    )
    parser.add_argument(
        "--repair",
        action="store_true",
        help="repair the store, and extract again only what is damaged (needs the server)",
    )


def run_verify(args) -> int:
    from eyas.capture.verify import verify
    from eyas.models.target import target_of
    from eyas.prompts.prompt_set import load_prompts

    config = config_of(args)
    target = target_of(config)
    prompts = load_prompts(config.answered_path)
    report = verify(
        config.store_dir, prompts, target.tokenizer(), deep=not args.quick, head=target.head()
    )
    print(report)
    if report.foreign:
        print("next: the same command with the profile and settings that the store was made with")
        return 1
    if not report.ok:
        if not args.repair:
            print("next: the same command with --repair")
            return 1
        report = _repaired(config, target, prompts, report)
        if report is None:
            return 1
    return _say_complete(config, prompts, report.ok)


def _repaired(config, target, prompts, report):
    """Repair the store and extract what is missing.

    Return the last report; None for an imported store, whose samples only another import has.
    """
    from eyas.capture.extract import extract
    from eyas.capture.verify import repair, verify
    from eyas.server.serve import need_servers
    from eyas.store.reader import Store

    for _ in range(REPAIR_ROUNDS):  # damage of samples shows only once the index is in order
        print("\n".join(repair(config.store_dir, report)))
        if Store.open(config.store_dir).manifest["prompts"]["hash"] is None:
            print(
                "an imported store; next: the same python -m eyas data import again "
                "brings back just these"
            )
            return None
        print(extract(config, need_servers(config), target, prompts))
        report = verify(config.store_dir, prompts, target.tokenizer(), head=target.head())
        print(report)
        if report.ok:
            break
    return report


def _say_complete(config, prompts, ok: bool) -> int:
    """Print how many samples of the profile the store has; return the exit code."""
    from eyas.prompts.prompt_set import chosen
    from eyas.store.reader import Store

    store = Store.open(config.store_dir)
    imported = store.manifest["prompts"]["hash"] is None
    if imported or not ok:
        return 0 if ok else 1
    asked = {conversation.id for conversation in chosen(config, prompts)}
    stored = asked & set(store.samples())
    text = f"complete: {len(stored)} of {len(asked)} samples that the profile asks for"
    if stored == asked:
        print(text)
        return 0
    print(f"{text}; next: python -m eyas extract, which says why the others are not there")
    return 1


def declare_parity(commands) -> None:
    parser = add_command(
        commands,
        "parity",
        run_parity,
        "compare stored states with references, and certify them",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="compare also with a second server that uses prefix cache and chunked prefill",
    )


def run_parity(args) -> int:
    from eyas.models.target import target_of
    from eyas.parity.certify import certify, summary
    from eyas.prompts.prompt_set import load_prompts
    from eyas.server.serve import need_servers
    from eyas.store.reader import Store

    config = config_of(args)
    store = Store.open(config.store_dir)
    has_prompts = store.manifest["prompts"]["hash"]  # an imported store has none
    prompts = load_prompts(config.answered_path) if has_prompts else None
    server = need_servers(config)[0]
    record = certify(config, server, store, target_of(config), prompts, full=args.full)
    print(summary(record))
    return 0 if record["passed"] else 1


# ---- data


def declare_data(commands) -> None:
    data = add_group(
        commands,
        "data",
        "manage runs and stores on disk: list, rm, export, import",
        default=data_list,
    )
    add_command(data, "list", data_list, "list runs, their parts and sizes", profile=False)
    _declare_data_rm(data)
    _declare_data_export(data)
    _declare_data_import(data)


def data_list(_args) -> int:
    from eyas import data_folder

    runs = data_folder.list_runs()
    print(runs.to_string(index=False) if len(runs) else "no runs yet")
    return 0


def _declare_data_rm(data) -> None:
    parser = add_command(
        data, "rm", data_rm, "say what would be removed; --yes removes it", profile=False
    )
    parser.add_argument("run_name", metavar="RUN", help="the run")
    parser.add_argument(
        "--part",
        default="store",
        choices=(*RUN_PARTS, "all"),
        help="which part of the run (default: its store)",
    )
    parser.add_argument("--yes", action="store_true", help="remove it")
    parser.add_argument(
        "--force", action="store_true", help="remove also a store that a drafter was trained from"
    )


def data_rm(args) -> int:
    from eyas import data_folder

    parts = RUN_PARTS if args.part == "all" else (args.part,)
    removal = data_folder.look(args.run_name, parts)
    text, flags = str(removal), "--yes"
    if removal.named_by:
        text += f"; the drafter of run {', '.join(removal.named_by)} was trained from it"
        flags += " --force"
    print(text)
    if not args.yes:
        print(f"nothing removed yet; the same command with {flags} removes it")
        return 0
    data_folder.remove(removal, args.force)
    print("removed")
    return 0


def _declare_data_export(data) -> None:
    parser = add_command(
        data, "export", data_export, "write the run's store as files of another project"
    )
    parser.add_argument(
        "--to",
        dest="format",
        required=True,
        choices=FORMATS,
        help="the format; speculators-v1 is that of speculators 0.3 and 0.4",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="an empty folder, or one that does not exist yet",
    )
    parser.add_argument(
        "--split", choices=("train", "heldout"), help="only these samples (default: all)"
    )


def data_export(args) -> int:
    from eyas.models.boundaries import drafter_boundaries
    from eyas.store.formats.exporting import export_store
    from eyas.store.reader import Store

    config = config_of(args)
    store = Store.open(config.store_dir)
    feeding = drafter_boundaries(config, store.boundaries[-1]).feeding
    print(export_store(store, args.format, args.out, feeding, args.split))
    return 0


def _declare_data_import(data) -> None:
    parser = add_command(
        data,
        "import",
        data_import,
        "make the run's store from files of another project; the same command resumes",
    )
    parser.add_argument(
        "--from", dest="format", required=True, choices=FORMATS, help="the format of the files"
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="the folder of the files; -p target and -p boundaries say what they were made from",
    )
    parser.add_argument(
        "--norm",
        choices=("pre", "post"),
        help="the last states are those before or after the final norm "
        "(default: what the format says, checked)",
    )
    parser.add_argument(
        "--heldout-every",
        type=int,
        default=20,
        metavar="N",
        help="hold out the first of every N samples (default: 20; 0: none)",
    )


def data_import(args) -> int:
    from eyas.models.target import target_of
    from eyas.store.formats.importing import import_store

    config = config_of(args)
    imported = import_store(
        config, target_of(config), args.format, args.source, args.norm, args.heldout_every
    )
    print(imported)
    train = len(imported.store.samples("train"))
    heldout = len(imported.store.samples("heldout"))
    if train > config.train_samples or heldout > config.heldout_samples:
        print(
            f"train_samples {config.train_samples:,} and heldout_samples "
            f"{config.heldout_samples:,} leave some of them out of a training; all of them: "
            f"python -m eyas train -p train_samples {train} -p heldout_samples {heldout}"
        )
    return 1 if imported.failed else 0
