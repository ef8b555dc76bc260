"""Commands about drafters: train, drafter, evaluate, study."""

import shlex
from pathlib import Path

from eyas.cli.options import add_command, add_group, config_of
from eyas.models.layer_ids import ENGINES


def declare_train(commands) -> None:
    add_command(
        commands,
        "train",
        run_train,
        "train the run's drafter from its store; the same command resumes",
    )


def run_train(args) -> int:
    from eyas.models.target import target_of
    from eyas.store.reader import Store
    from eyas.training import distributed
    from eyas.training.summary import summary
    from eyas.training.trainer import train

    config = config_of(args)
    train(config, Store.open(config.store_dir), target_of(config))
    if distributed.RANK == 0:
        print(summary(config))
    return 0


# ---- drafter


def declare_drafter(commands) -> None:
    drafter = add_group(commands, "drafter", "move a drafter in or out: import, export, layer-ids")
    _declare_import(drafter)
    parser = add_command(
        drafter, "export", drafter_export, "write the run's drafter as SGLang or vLLM loads it"
    )
    parser.add_argument(
        "--to",
        default="sglang",
        choices=("sglang", "vllm", "speculators"),
        help="the layout (default: sglang; vllm and speculators read the same files)",
    )
    parser = add_command(
        drafter,
        "layer-ids",
        drafter_layer_ids,
        "show what each engine, version and model family means by a layer id",
        profile=False,
    )
    parser.add_argument(
        "--blocks", type=int, default=30, metavar="N", help="blocks of the target (default: 30)"
    )


def _declare_import(drafter) -> None:
    parser = add_command(
        drafter,
        "import",
        drafter_import,
        "make a checkpoint that others trained the drafter of run_name, to evaluate it",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint in the layout of SGLang, SpecForge or speculators",
    )
    parser.add_argument(
        "--ids-of",
        choices=ENGINES,
        metavar="ENGINE",
        help=f"the engine whose layer ids it has: {', '.join(ENGINES)} "
        "(default: the layout's own engine); -p boundaries says instead what feeds it",
    )
    parser.add_argument(
        "--norm-before-residual",
        choices=("yes", "no"),
        help="needed where a checkpoint in the layout of speculators does not say it",
    )


def drafter_import(args) -> int:
    from eyas.models.import_drafter import import_drafter
    from eyas.models.target import target_of

    config = config_of(args)
    names = [name.rpartition(".")[2] for name, _ in args.p or []]  # -p drafter.boundaries too
    boundaries = config.boundaries if "boundaries" in names else ()
    residual = {"yes": True, "no": False, None: None}[args.norm_before_residual]
    print(
        import_drafter(
            args.folder,
            target_of(config),
            config.drafter_dir,
            args.ids_of or "",
            boundaries,
            residual,
        )
    )
    run = config.run_name
    print(
        f"next: python -m eyas evaluate decode -p drafter_run {run}, "
        "with the profile of a run whose prompts are to judge it; its own results stay, and "
        f"python -m eyas evaluate compare -p drafter_run {run} -p compare_run THAT_RUN "
        "compares the two drafters\n"
        f"without such a run: python -m eyas evaluate decode -p run_name {run} "
        "-p eval_set FILE.jsonl, or humaneval"
    )
    return 0


def drafter_export(args) -> int:
    from eyas.models.drafter import load_drafter
    from eyas.models.target import target_of
    from eyas.training.summary import weights_text

    config = config_of(args)
    target = target_of(config)
    drafter = load_drafter(config.drafter_dir, target, config.drafter_file)
    if text := weights_text(config):
        print(text)
    if args.to == "sglang":
        print(_export_for_sglang(config, target, drafter))
    else:
        print(_export_for_vllm(config, target, drafter, args.to))
    return 0


def _export_for_sglang(config, target, drafter) -> str:
    """Write the drafter for SGLang; return the command that serves it."""
    from eyas.models.export import export_sglang, made_from
    from eyas.models.layer_ids import SGLANG

    folder = export_sglang(drafter, target, config.export_dir, made_from=made_from(config))
    text = (
        f"for {SGLANG.replace('sglang', 'SGLang')}, with the draft settings of the profile:\n"
        + _sglang_line(config, target.folder, folder)
    )
    if drafter.config.norm_output:
        text += (
            "\nit feeds back the drafter's normed output (norm_output in config.json), "
            "which this SGLang does; "
            "one that does not know it accepts less from the second draft on"
        )
    return text


def _export_for_vllm(config, target, drafter, layout: str) -> str:
    """Write the drafter for vLLM and speculators; return the command that serves it."""
    from eyas.models.export import export_speculators, made_from

    folder = export_speculators(
        drafter,
        target,
        config.export_dir / "vllm",
        config.speculative_num_steps,
        layout,
        made_from(config),
    )
    text = (
        "for vLLM and speculators, with the draft settings of the profile:\n"
        + _vllm_line(config, target.folder, folder)
        + "\nvLLM was never run here"
    )
    if drafter.config.norm_output:
        text += (
            "; it has to know norm_output of config.json, "
            "or it accepts less from the second draft on"
        )
    return text


def _sglang_line(config, model: Path, folder: Path) -> str:
    """Return the command that serves the export as `evaluate decode` judged it.

    SGLang chooses for itself what the command does not say; for a Llama that is a tree of 8 tokens.
    Address, memory and the like are left to whoever serves.
    """
    words = ["python", "-m", "sglang.launch_server", "--model-path", model, "--dtype", config.dtype]
    if config.tensor_parallel > 1:
        words += ["--tp-size", config.tensor_parallel]
    if config.trust_remote_code:
        words += ["--trust-remote-code"]
    words += ["--speculative-algorithm", "EAGLE3"]
    words += ["--speculative-draft-model-path", folder]
    words += ["--speculative-num-steps", config.speculative_num_steps]
    words += ["--speculative-eagle-topk", config.speculative_eagle_topk]
    words += ["--speculative-num-draft-tokens", config.verified_tok]
    if config.speculative_use_rejection_sampling:
        words += ["--speculative-use-rejection-sampling"]
    return shlex.join(map(str, words))


def _vllm_line(config, model: Path, folder: Path) -> str:
    """Return the same for vLLM, which drafts chains.

    It names the target, since the target in the export's config.json is a folder of this machine.
    """
    import json

    speculative = json.dumps(
        {
            "method": "eagle3",
            "model": str(folder),
            "num_speculative_tokens": config.speculative_num_steps,
        }
    )
    words = ["vllm", "serve", model, "--dtype", config.dtype]
    if config.tensor_parallel > 1:
        words += ["--tensor-parallel-size", config.tensor_parallel]
    if config.trust_remote_code:
        words += ["--trust-remote-code"]
    words += ["--speculative-config", speculative]
    return shlex.join(map(str, words))


def drafter_layer_ids(args) -> int:
    from eyas.models.layer_ids import round_trip, round_trip_text

    print(f"A target of {args.blocks} blocks (--blocks N):")
    print(round_trip_text(round_trip(args.blocks)))
    return 0


# ---- evaluate


def declare_evaluate(commands) -> None:
    evaluate = add_group(
        commands, "evaluate", "measure acceptance and speed: offline, decode, served, compare"
    )
    add_command(
        evaluate,
        "offline",
        evaluate_offline,
        "estimate the drafter's acceptance from the stored held-out states",
    )
    add_command(
        evaluate,
        "decode",
        evaluate_decode,
        "decode held-out prompts with the drafter and without: acceptance, speed, same output",
    )
    add_command(
        evaluate,
        "served",
        evaluate_served,
        "serve the drafter in SGLang and compare its acceptance with that of `evaluate decode`",
    )
    add_command(
        evaluate,
        "compare",
        evaluate_compare,
        "compare the run's drafter with that of -p compare_run NAME, paired by prompt",
    )


def evaluate_offline(args) -> int:
    from eyas.evaluation.offline import run_walk, summary
    from eyas.models.drafter import load_drafter
    from eyas.models.target import target_of
    from eyas.store.reader import Store

    config = config_of(args)
    store = Store.open(config.judged_store_dir)
    drafter = load_drafter(config.judged.drafter_dir, target_of(config), config.drafter_file)
    print(summary(run_walk(config, drafter, store)))
    return 0


def evaluate_decode(args) -> int:
    from eyas.evaluation.acceptance import eval_prompts, measure
    from eyas.evaluation.speed import model_speed, speed_text
    from eyas.models.drafter import load_drafter
    from eyas.models.target import target_of

    config = config_of(args)
    target = target_of(config)
    prompts = eval_prompts(config, target)
    drafter = load_drafter(config.judged.drafter_dir, target, config.drafter_file)
    acceptance = measure(config, target, drafter, prompts)
    print(acceptance)
    print(speed_text(model_speed(config, target, drafter, prompts, acceptance)))
    return 0


def evaluate_served(args) -> int:
    from eyas.evaluation.acceptance import eval_prompts
    from eyas.evaluation.served import check
    from eyas.models.drafter import load_drafter
    from eyas.models.target import target_of

    config = config_of(args)
    target = target_of(config)
    drafter = load_drafter(config.judged.drafter_dir, target, config.drafter_file)
    result = check(config, target, drafter, eval_prompts(config, target))
    print(result)
    return 0 if result.passed else 1


def evaluate_compare(args) -> int:
    from eyas.evaluation.acceptance import compare_runs, comparison_text

    print(comparison_text(compare_runs(config_of(args))))
    return 0


# ---- study


def declare_study(commands) -> None:
    study = add_group(commands, "study", "search for better choices: layers, server")
    add_command(
        study,
        "layers",
        study_layers,
        "compare drafters fed from many choices of layers; the same command resumes",
    )
    add_command(
        study,
        "server",
        study_server,
        "keep the server settings that measurably help; the same command resumes",
    )


def study_layers(args) -> int:
    from eyas.models.target import target_of
    from eyas.store.reader import Store
    from eyas.studies.boundaries import run_study, study_text

    config = config_of(args)
    study = run_study(config, Store.open(config.store_dir), target_of(config))
    print(study_text(study))
    return 1 if study.record["failed"] else 0


def study_server(args) -> int:
    from eyas.models.target import target_of
    from eyas.prompts.prompt_set import load_prompts
    from eyas.studies.server_settings import summary, tune, tuned_profile

    config = config_of(args)
    result = tune(config, target_of(config), load_prompts(config.answered_path))
    print(summary(result))
    if result["helped"]:
        print(f"kept as a profile: --profile {tuned_profile(config)}")
    return 0
