"""Ask the server for the target's own responses to a prompt set.

python -m eyas prompts generate --profile P
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx

from eyas.errors import EyasError
from eyas.files import data_dir, read_json, sha256_file, sha256_json, write_json
from eyas.models.target import Target, load_target
from eyas.progress import Progress
from eyas.prompts.chat_template import (
    end_of_turn,
    prompt_ids,
    repeated_bigrams,
    template_hash,
    tokenizer_hash,
)
from eyas.prompts.prompt_set import (
    Conversation,
    PromptSet,
    keep_earlier_answers,
    usable,
    write_prompts,
)
from eyas.server.serve import LIMITS, Server

ATTEMPTS = 4  # per request, for failures of the transport
REQUEST_TIMEOUT_S = 600.0


def check_responses(prompts: PromptSet, target: Target, tokenizer) -> None:
    """Raise EyasError if the target wrote a file's answers under another chat template.

    The file's manifest says so. Other chat_template_kwargs make another template too.
    """
    files = [prompts.path]
    if not prompts.path.is_file():
        files = sorted(prompts.path.parent.glob(prompts.path.name))
    for file in files:
        try:
            manifest = read_json(file.with_suffix(".json"))
            is_ours = manifest["target"]["fingerprint"] == target.fingerprint
            is_this_file = manifest["sha256"] == sha256_file(file)
            is_current = is_ours and is_this_file
            differs = is_current and manifest["template_hash"] != template_hash(tokenizer)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no manifest, or a file of that name that is something else
        if differs:
            kwargs = ""
            if "chat_template_kwargs" in manifest:
                kwargs = json.dumps(manifest["chat_template_kwargs"])
            raise EyasError(
                f"{file.name}: {target.name} wrote its answers under another chat template"
                " or with other chat_template_kwargs",
                f"the same, chat_template_kwargs = {kwargs!r}",
                f"-p chat_template_kwargs '{kwargs}', or python -m eyas prompts generate",
            )


def generate_responses(
    url: str,
    target: Target,
    conversations: list[Conversation],
    max_new_tok: int,
    concurrency: int,
    out_path: Path,
    progress: Progress | None = None,
) -> dict:
    """Ask a running server for every assistant turn, greedily; dialogues turn by turn.

    Write `out_path` (JSONL) and its manifest (.json), and return the manifest. Assistant turns of
    the prompt set are replaced. Finished conversations are kept in data/responses/, so that the
    same call resumes after any interruption. Another prompt set, target, engine or setting has
    another file there.

    Raise EyasError if the server does not answer or serves another model. Raise it at the end, with
    their names, if the server refused conversations; the others are kept.
    """
    out_path = Path(out_path)
    url = url.rstrip("/")
    status = Server(url).status()
    if not _serves(status, target):
        raise EyasError(
            f"the server at {url} serves {Path(status['model']).name}",
            f"the target {target.name}",
            "python -m eyas server down, then python -m eyas server up",
        )
    tokenizer = target.tokenizer()
    asked = [c.questions() for c in usable(conversations)]
    settings = _settings(target, tokenizer, status, asked, max_new_tok)
    name = f"{out_path.stem}-{sha256_json(settings)[:16]}.partial.jsonl"
    partial = data_dir() / "responses" / name
    with _only_writer(partial):
        done = _read_partial(partial)
        if progress is not None:
            progress.total = len(asked) - len(done)
        failures = _answer_all(
            url,
            asked,
            done,
            tokenizer,
            settings["sampling"],
            concurrency,
            partial,
            progress,
        )
        if failures:
            raise EyasError(
                f"{len(failures)} of {len(asked)} conversations got no answer: "
                + "; ".join(failures[:5]),
                "an answer to each",
                "the same command again asks only for the missing ones",
            )
        answered = [dataclasses.replace(c, messages=tuple(done[c.id]["messages"])) for c in asked]
        keep_earlier_answers(out_path, settings)
        write_prompts(out_path, answered)
        manifest = _manifest(out_path, answered, done, settings)
        write_json(out_path.with_suffix(".json"), manifest)
        partial.unlink()
    return manifest


def _serves(status: dict, target: Target) -> bool:
    """Return whether a server serves the target, from this folder or from an equal one."""
    folder = Path(status["model"])
    if folder.resolve() == target.folder.resolve():
        return True
    has_config = (folder / "config.json").is_file()
    return has_config and load_target(str(folder)).fingerprint == target.fingerprint


def _settings(
    target: Target, tokenizer, status: dict, asked: list[Conversation], max_new_tok: int
) -> dict:
    """Return what decides the responses."""
    template_settings = {}
    if getattr(target, "chat_template_kwargs", ""):
        template_settings["chat_template_kwargs"] = json.loads(target.chat_template_kwargs)
    return {
        "target": {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "config_hash": target.config_hash,
        },
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        **template_settings,
        "engine": {
            "name": "sglang",
            "version": status["sglang"],
            "device": status["device"],
            "dtype": status["dtype"],
        },
        "sampling": {
            "temperature": 0.0,
            "max_new_tokens": max_new_tok,
            "stop_token_ids": [end_of_turn(tokenizer)],
        },
        "prompts_hash": sha256_json([c.to_dict() for c in asked]),
    }


@contextlib.contextmanager
def _only_writer(partial: Path) -> Iterator[None]:
    """Lock the partial file. Raise EyasError if another process has locked it."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    with open(partial, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EyasError(
                "these responses are being generated by another process already", "one at a time"
            ) from None
        yield


def _read_partial(partial: Path) -> dict[str, dict]:
    """Return the finished conversations by id.

    A last line that a kill has torn is cut off, and its conversation is asked again.
    """
    data = partial.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(partial, len(whole))
    return {row["id"]: row for row in map(json.loads, whole.splitlines())}


def _answer_all(
    url: str,
    asked: list[Conversation],
    done: dict,
    tokenizer,
    sampling: dict,
    concurrency: int,
    partial: Path,
    progress: Progress | None,
) -> list[str]:
    """Ask for all missing conversations; add them to `done` and to the partial file.

    Return a line for each conversation that the server refused. Raise EyasError at once if the
    server does not answer.
    """
    failures = []
    with (
        open(partial, "ab") as file,
        httpx.Client(timeout=REQUEST_TIMEOUT_S, limits=LIMITS) as client,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        futures = {
            pool.submit(_answer, client, url, c, tokenizer, sampling): c
            for c in asked
            if c.id not in done
        }
        try:
            for future in as_completed(futures):
                try:
                    row = future.result()
                except _Refused as error:
                    failures.append(f"{futures[future].id}: {error}")
                    if progress is not None:
                        progress.update(errors=1)
                    continue
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                done[row["id"]] = row
                if progress is not None:
                    progress.update(samples=1, tok=sum(map(len, row["output_ids"])))
            os.fsync(file.fileno())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return failures


class _Refused(Exception):
    """Report that the server refused this one conversation; the others continue."""


def _answer(
    client: httpx.Client, url: str, conversation: Conversation, tokenizer, sampling: dict
) -> dict:
    """Ask for every answer of a conversation.

    Return {"id", "messages" with every answer, "output_ids"}. The last are the model's own ids of
    each answer, with the end-of-turn token.
    """
    messages = []
    outputs = []
    for message in conversation.messages:
        messages.append(message)
        if message["role"] != "user":
            continue
        try:
            ids = prompt_ids(messages, tokenizer, conversation.id)
        except EyasError as error:  # an earlier answer contains a control token
            raise _Refused(str(error)) from None
        answer = _post(client, url, {"input_ids": ids, "sampling_params": sampling})
        output = answer["output_ids"]
        reason = answer["meta_info"]["finish_reason"]
        end = sampling["stop_token_ids"][0]
        # After another stop token the answer counts as cut: the template does not write that token.
        stopped = reason["type"] == "stop" and reason["matched"] == end
        by_token = reason["type"] == "stop" and isinstance(reason["matched"], int)
        if not (reason["type"] == "length" or by_token):  # aborted, NaN
            raise _Refused(f"it ended with {reason}")
        words = output[:-1] if stopped and output and output[-1] == end else output
        text = tokenizer.decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not stopped:
            text = text.rstrip("\ufffd")  # a character of several tokens that was cut
        same_ids = tokenizer.encode(text, add_special_tokens=False) == words
        messages.append(
            {
                "role": "assistant",
                "content": text,
                "finish": "stop" if stopped else "length",
                "same_ids": same_ids,
            }
        )
        outputs.append(output)
    return {"id": conversation.id, "messages": messages, "output_ids": outputs}


def _post(client: httpx.Client, url: str, request: dict) -> dict:
    """Send one request, again after failures of the transport; return the answer."""
    attempt = 1
    while True:
        try:
            response = client.post(f"{url}/generate", json=request)
            break
        except httpx.TransportError as error:
            if attempt == ATTEMPTS:
                raise EyasError(
                    f"no answer from {url}: {type(error).__name__}",
                    "a running SGLang server",
                    "python -m eyas server up, then the same command again: it resumes",
                ) from None
            time.sleep(0.5 * 2**attempt)
            attempt += 1
    if response.status_code != 200:
        raise _Refused(f"HTTP {response.status_code}, {response.text[:200]}")
    return response.json()


def _manifest(path: Path, answered: list[Conversation], done: dict, settings: dict) -> dict:
    """Return the manifest of a file of responses: its origin, licence, counts and settings."""
    answers = [m for c in answered for m in c.messages if m["role"] == "assistant"]
    outputs = [ids for c in answered for ids in done[c.id]["output_ids"]]
    repeated, pairs = map(sum, zip(*map(repeated_bigrams, outputs)))
    tok = sum(map(len, outputs))
    categories = {}
    for name in sorted({c.category for c in answered}):
        categories[name] = dict(Counter(c.split for c in answered if c.category == name))
    generate = "python -m eyas prompts generate --profile demo"
    return {
        "file": path.name,
        "sha256": sha256_file(path),
        "what": "conversations made from this repository's own topics and phrasings;"
        " the assistant's turns are the target's own, greedy",
        "licence": "Apache-2.0 (prompts: this repository;"
        " responses: made with the target named below)",
        "make_again": [
            "python -m eyas server up --profile demo",
            f"{generate} -p prompt_set data_manifests/{path.name}",
        ],
        "conversations": {"total": len(answered), **Counter(c.split for c in answered)},
        "categories": categories,
        "responses": {
            "total": len(answers),
            "tok": tok,
            "mean_tok": round(tok / len(answers), 2),
            # length: the answer was cut; its end-of-turn token is not supervised
            "finish": dict(Counter(m["finish"] for m in answers)),
            "empty": sum(m["content"] == "" for m in answers),
            # answers whose text, tokenised again, gives the model's own ids
            "same_ids": sum(m["same_ids"] for m in answers),
            "repeated_bigrams": {
                "repeated": repeated,
                "total": pairs,
                "share": round(repeated / max(pairs, 1), 4),
            },
        },
        **settings,
        "note": "greedy decoding in bfloat16 depends on the mix of a batch where two tokens tie,"
        " so a set made again may differ in some words",
    }
