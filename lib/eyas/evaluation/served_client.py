"""Ask a running server for answers, and read what it says that it accepted."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.acceptance import Prompt
from eyas.intervals import ratio_interval
from eyas.server.serve import LIMITS, Server

COMMAND = "python -m eyas evaluate served"


@dataclass(frozen=True)
class Answer:
    """One prompt's answer: its tokens, the token that ended it (None: the length did), the drafts accepted by each verify step, prompt tokens as the server counts them."""

    output_ids: list[int]
    end_id: int | None
    accepted: list[int]
    prompt_tok: int
    seconds: float


def read_answer(answer: dict, seconds: float = 0.0) -> Answer:
    """An answer of /generate. EyasError: it was aborted; the server does not say what each step accepted; its own sums say something else."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    end_id = reason.get("matched") if reason["type"] == "stop" else None
    if reason["type"] != "length" and not isinstance(end_id, int):
        raise EyasError(
            f"the server ended an answer with {reason}",
            "the end of the text, or as many tokens as were asked for",
            "look into the server's log",
        )
    n_steps, n_accepted = (
        meta.get("spec_verify_ct", 0),
        meta.get("spec_num_correct_drafts", 0),
    )  # without a drafter there are none
    accepted = [
        n for n in meta.get("eyas_accepted") or [] if n is not None
    ]  # one value a token: at the first of a step
    if n_steps and not accepted:
        raise EyasError(
            "the server says how many drafts it accepted, not in which step",
            "meta_info.eyas_accepted, from this repository's plugin",
            "patches/README.md says how to start a server with it",
        )
    if (len(accepted), sum(accepted)) != (n_steps, n_accepted):
        raise EyasError(
            f"{len(accepted)} verify steps with {sum(accepted)} accepted drafts",
            f"SGLang's own counts, {n_steps} and {n_accepted}",
        )
    return Answer(answer["output_ids"], end_id, accepted, meta["prompt_tokens"], seconds)


class Asker:
    """One server's answers to the profile's prompts, at its temperature (0: greedy). EyasError: it is away, or refuses a prompt."""

    def __init__(self, server: Server, config: Config):
        self.server, self.n_tok, self.temperature = (
            server,
            config.decode_new_tok + config.speculative_num_steps,
            config.temperature,
        )
        self._client = httpx.Client(
            base_url=server.url, timeout=config.request_timeout_s, limits=LIMITS
        )

    def one(self, prompt: Prompt, n_tok: int = 0) -> Answer:
        request = {
            "input_ids": prompt.input_ids,
            "sampling_params": {
                "max_new_tokens": n_tok or self.n_tok,
                "temperature": self.temperature,
                "custom_params": {"eyas_accepted": True},
            },
        }
        start = time.perf_counter()
        try:
            response = self._client.post("/generate", json=request)
        except httpx.HTTPError as error:
            raise EyasError(
                f"no answer from {self.server.url}: {type(error).__name__}",
                "a running SGLang server",
                COMMAND,
            ) from None
        seconds = time.perf_counter() - start
        if response.status_code != 200:
            raise EyasError(
                f"the server refused the prompt of {prompt.id}: HTTP {response.status_code}, {response.text[:200]}",
                "an answer",
                "look into the server's log",
            )
        return read_answer(response.json(), seconds)

    def all(
        self,
        prompts: list[Prompt],
        parallel: int,
        done: Callable[[Answer], None] = lambda answer: None,
    ) -> list[Answer]:
        """All answers, `parallel` requests at a time; `done` hears of each."""

        def one(prompt: Prompt) -> Answer:
            answer = self.one(prompt)
            done(answer)
            return answer

        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(one, prompts))


def speed(plain: Asker, drafting: Asker, prompts: list[Prompt], seed: int) -> dict:
    """Plain seconds / seconds with the drafter, for as many tokens, one request at a time: the two servers take turns, and the first turn.

    Both have the prompts in their prefix caches since `all`, so what is timed is decoding.
    """
    seconds = []
    for i, prompt in enumerate(prompts):
        pair = {asker: asker.one(prompt) for asker in (plain, drafting)[:: 1 if i % 2 else -1]}
        seconds.append(
            (
                pair[plain].seconds * len(pair[drafting].output_ids) / len(pair[plain].output_ids),
                pair[drafting].seconds,
            )
        )
    return ratio_interval([s[0] for s in seconds], [s[1] for s in seconds], seed).as_dict()
