"""Say which settings each command reads, and which of those given with -p have no effect.

`tests/test_effects.py` compares the table with the code that each command reaches, and with what
a command reads while it runs.
"""

from eyas.config import Config

Names = frozenset[str]


def _names(text: str) -> Names:
    return frozenset(text.split())


RUN = _names("run_name")
TARGET = _names("target trust_remote_code chat_template_kwargs")
FIND = _names("run_name server_url")  # a server that runs already
DRAFT = _names(
    "speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens "
    "speculative_use_rejection_sampling"
)
SERVER = (
    DRAFT
    | TARGET
    | _names(
        "run_name seed threads device dtype port tensor_parallel max_total_tok context_tok "
        "server_timeout_s spool_dir spool_gib max_prefill_tok server_args server_env"
    )
)
STORED = _names("boundaries extra_boundaries")
ANSWERED = _names("run_name prompt_set generate_responses")
CHOSEN = ANSWERED | _names("seed train_samples heldout_samples max_length")
JUDGED = TARGET | _names("run_name member drafter_run drafter_weights seed threads device")
EXTRACT = (
    FIND
    | TARGET
    | STORED
    | CHOSEN
    | _names("concurrency request_timeout_s shard_mib store_fp8 spool_gib")
)
EVALUATED = ANSWERED | _names("eval_set decode_prompts decode_new_tok max_length")
TRAIN = TARGET | _names(
    "run_name member drafter_run drafter_weights boundaries seed threads device mix train_samples "
    "heldout_samples draft_vocab_size draft_steps step_decay loss fc_norm norm_output "
    "initial_weights epochs batch_tok pass_tok learning_rate warmup_ratio train_dtype parallel "
    "checkpoint_steps keep_checkpoints eval_steps patience spike_ratio without_parity"
)

READS: dict[str, Names] = {
    "server up": SERVER | STORED | FIND,
    "server command": (SERVER - _names("server_timeout_s")) | STORED,
    "server wait": FIND | _names("server_timeout_s"),
    "server status": FIND,
    "server down": FIND,
    "study server": SERVER
    | STORED
    | CHOSEN
    | _names(
        "server_url concurrency request_timeout_s tune_minutes tune_try tune_rounds tune_samples "
        "tune_new_tok tune_together"
    ),
    "prompts show": _names("prompt_set"),
    "prompts generate": FIND | TARGET | ANSWERED | _names("max_new_tok concurrency"),
    "plan": TARGET | STORED | CHOSEN | _names("dtype shard_mib spool_gib store_fp8"),
    "extract": EXTRACT,
    "verify": EXTRACT,  # --repair extracts again
    "data export": RUN | _names("boundaries"),
    "data import": RUN
    | TARGET
    | _names("boundaries shard_mib store_fp8 train_samples heldout_samples"),
    "parity": SERVER | STORED | FIND | ANSWERED | _names("parity_samples max_length"),
    "train": TRAIN,
    "study layers": (TRAIN - _names("member boundaries"))
    | _names(
        "speculative_num_steps sweep_parallel ray_address sweep_seeds contenders forward_tried"
    ),
    "evaluate offline": JUDGED | _names("speculative_num_steps temperature"),
    "evaluate decode": JUDGED
    | DRAFT
    | EVALUATED
    | _names("temperature baseline_prompts speed_steps speed_topk check_bf16_prompts"),
    "evaluate compare": _names("run_name member drafter_run drafter_weights compare_run seed"),
    "evaluate served": (SERVER - _names("spool_dir"))
    | JUDGED
    | EVALUATED
    | _names(
        "temperature concurrency request_timeout_s serve_prompts serve_url serve_dtype "
        "serve_timed_prompts"
    ),
    "drafter export": TARGET
    | DRAFT
    | _names("run_name member drafter_weights dtype tensor_parallel"),
    "drafter import": TARGET | _names("run_name member boundaries"),
    "job follow": RUN,
    "job stop": RUN,
}  # `settings` prints every setting, `report` hands them to the notebooks that declare them


def without_effect(command: str, names: list[str], config: Config) -> str:
    """Return a sentence about those of these settings that the command does not read.

    Return "" where it reads all of them.
    """
    if command not in READS:
        return ""
    names = [name.rpartition(".")[2] for name in names]  # -p training.epochs 3
    found = [name for name in names if name not in READS[command]]
    if command in ("train", "study layers") and config.initial_weights != "drafter":
        found += [
            name for name in names if name in ("drafter_run", "drafter_weights")
        ]  # they say which one
    if not found:
        return ""
    return (
        f"setting {found[0]} has no effect on `{command}`"
        if len(found) == 1
        else f"settings {', '.join(found)} have no effect on `{command}`"
    )
