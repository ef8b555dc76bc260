"""The parity certificate: clean data of three targets pass, and every fault of the list is caught
by the test that is to catch it.

Two tiny targets (Llama, Qwen3) have a server each for the length of this module; SmolLM2 has the
session's.
"""

import contextlib
import dataclasses
import shutil
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import eyas.parity.certify
import eyas.parity.references
from eyas.capture.extract import extract
from eyas.cli import main
from eyas.config import Config
from eyas.errors import EyasError
from eyas.files import read_json, write_json, write_safetensors
from eyas.models.target import load_target
from eyas.parity.certify import certify, chosen_samples, unseen
from eyas.parity.checks import (
    Evidence,
    ReferenceHead,
    after_norm,
    as_stored,
    distance,
    examine,
    match,
    text_test,
)
from eyas.parity.faults import FP8, clean, faults, template_mismatch
from eyas.parity.references import CHUNK_TOK, Asked, HuggingFace, ask, ask_full
from eyas.prompts.prompt_set import load_prompts
from eyas.server.serve import server_up
from eyas.store.certificate import certificate_path, need_certificate, read_certificate, verdict
from eyas.store.reader import NormedHead, Store, content_hash
from eyas.training.trainer import train
from helpers.tiny import make_tiny_target

CAUGHT_BY = {  # fault -> the test that has to catch it; others may too
    "boundary shifted by one, start": "boundary",
    "boundary shifted by one, middle": "boundary",
    "boundary shifted by one, end": "head",
    "last state after the norm": "head",
    "rows shifted by one token": "head",
    "one row repeated, the next dropped": "boundary",
    "half the rows from a prefix-cache hit": "boundary",
    "the same, another request's rows in their place": "boundary",
    "states of two samples swapped": "head",
    "two samples swapped whole": "text",
    "right tensor, another sample's token ids": "boundary",
    "fp8 scale shared over boundaries": "boundary",
    "loss mask off by one, late": "text",
    "loss mask off by one, early": "text",
    "template mismatch": "text",
    "head permuted": "head",
    "embedding as head": "head",
    "head scaled by 1.01": "head",
    "half the head's rows shifted by one": "head",
    "two rows of the head exchanged": "head",
    "final norm's weight left at 1": "head",
    "final norm's weight of another model": "head",
    "final norm with another epsilon": "head",
    "one row of another sample": "boundary",
    "one row not finite": "boundary",
    "one row of zeros": "boundary",
}
WRONG_HEADS = [
    fault
    for fault, caught_by in CAUGHT_BY.items()
    if "head" in fault
    or "norm" in fault
    and caught_by == "head"
    and fault != "last state after the norm"
]


@dataclasses.dataclass
class Case:
    """A store with its server, and the evidence on some of its samples."""

    config: Config
    server: object
    target: object
    prompts: object
    store: Store
    samples: dict
    evidence: dict
    reference: HuggingFace

    def __post_init__(self):
        self.head, self.tokenizer, self.dtype = (
            self.store.head(),
            self.target.tokenizer(),
            self.store.manifest["dtype"],
        )

    def examine(self, samples, evidence=None, dtype=None, head=None) -> dict:
        """{name of a test: its verdict}."""
        evidence, head, dtype = evidence or self.evidence, head or self.head, dtype or self.dtype
        return {v.name: v for v in examine(samples, evidence, head, dtype, self.tokenizer)}

    def anew(self, ids: torch.Tensor, expected=None) -> tuple[dict[int, torch.Tensor], Evidence]:
        """What the server computes for these ids, and the evidence on them."""
        with Asked(self.server, self.store.boundaries) as asked:
            served = asked.prefill(ids.tolist())
        return served.states["another batch"][1], Evidence(
            served, self.reference(ids, served.top_ids), expected
        )


def make_case(config: Config, server, n_samples: int) -> Case:
    target, prompts = load_target(config.target), load_prompts(config.prompt_path)
    extract(config, [server], target, prompts)
    store = Store.open(config.store_dir)
    tokenizer, reference = target.tokenizer(), HuggingFace(target, 2)
    samples = {id: store.read(id) for id in chosen_samples(store, n_samples, seed=1, token_bytes=1)}
    served = ask(server, samples, store.boundaries)
    expected = eyas.parity.certify.expected_samples(config, prompts, tokenizer, list(samples))
    evidence = {
        id: Evidence(
            served[id], reference(samples[id]["input_ids"], served[id].top_ids), expected[id]
        )
        for id in samples
    }
    return Case(config, server, target, prompts, store, samples, evidence, reference)


@pytest.fixture(scope="module", params=[pytest.param("Llama", marks=pytest.mark.slow), "Qwen3"])
def running_case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as stack:
        with (
            pytest.MonkeyPatch.context() as patch
        ):  # while it is made; then each test sets it for itself
            patch.setenv("EYAS_DATA", str(folder / "data"))
            target = make_tiny_target(
                folder / f"tiny-{request.param}", family=request.param, seed=3
            )
            config = Config.create(
                run_name="parity",
                target=str(target),
                boundaries=(1, 2, 3),
                train_samples=14,
                heldout_samples=4,
                max_length=320,
                context_tok=1000,
                max_total_tok=8192,
                shard_mib=1,
                parity_samples=4,
            )
            made = make_case(config, stack.enter_context(server_up(config, tied=True)), n_samples=3)
        yield made


@pytest.fixture
def case(running_case, monkeypatch):
    monkeypatch.setenv("EYAS_DATA", str(running_case.store.folder.parents[2]))
    return running_case


@pytest.fixture(scope="module")
def altered(running_case):
    """{fault: Altered} of this case."""
    case = running_case
    return {
        found.fault: found
        for found in faults(
            case.samples,
            case.evidence,
            case.head,
            case.dtype,
            case.tokenizer,
            case.target.embedding(),
        )
    }


# ---- clean data


@pytest.mark.server
def test_the_certificate_of_clean_data(case):
    record = certify(case.config, case.server, case.store, case.target, case.prompts)
    assert record["passed"], eyas.parity.certify.summary(record)
    assert [t["name"] for t in record["tests"] if t["ok"]] == [
        "text",
        "head",
        "boundary",
        "serving",
    ]
    assert {row["how"] for row in record["tests"][3]["rows"]} == {"another batch", "decoding"}
    assert all(
        row["caught by"] == ("nothing" if row["fault"].startswith("none") else row["caught by"])
        for row in record["faults"]
    )
    assert [row["fault"] for row in record["faults"] if row["caught by"] == "nothing"] == [
        "none",
        "none, stored as fp8",
    ]
    assert len(record["samples"]) == 4 and set(record["samples"]) <= set(case.store.samples())
    assert need_certificate(case.store, "parity")["samples"] == record["samples"]
    assert verdict(record) == "passed (4 tests, 4 samples)"


@pytest.mark.server
def test_clean_fp8_passes_and_so_does_a_store_of_fp8(case):
    for found in clean(case.samples, case.evidence, case.head, case.dtype):
        for name, v in case.examine(found.samples, found.evidence, found.dtype, found.head).items():
            assert v.ok is not False, (found.fault, name, v.detail)
    config = dataclasses.replace(
        case.config, run_name="fp8", store_fp8=True, server_url=case.server.url
    )
    extract(config, [case.server], case.target, case.prompts)
    store = Store.open(config.store_dir)
    assert store.manifest["dtype"] == FP8
    record = certify(config, case.server, store, case.target, case.prompts)
    assert record["passed"], eyas.parity.certify.summary(record)


@pytest.mark.slow
@pytest.mark.server
def test_smollm2_passes(server, embedded):
    config, running = server
    config = Config.create(
        run_name="parity",
        target=config.target,
        server_url=running.url,
        train_samples=10,
        heldout_samples=2,
        max_length=128,
        parity_samples=4,
    )
    prompts = load_prompts(config.prompt_path)
    extract(config, [running], embedded, prompts)
    record = certify(config, running, Store.open(config.store_dir), embedded, prompts)
    assert record["passed"], eyas.parity.certify.summary(record)
    assert [row["caught by"] for row in record["faults"] if row["fault"].startswith("none")] == [
        "nothing",
        "nothing",
    ]
    shown = {row["fault"] for row in record["faults"]} - {"none", "none, stored as fp8"}
    assert shown == CAUGHT_BY.keys() - {"embedding as head"}, "its head is its embedding"
    for row in record["faults"]:
        assert CAUGHT_BY.get(row["fault"], "nothing") in row["caught by"], row
    policy = record["tests"][4]["rows"][0]
    assert policy["greedy"] / policy["supervised"] > 0.9, "the shipped responses are its own"


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("running_case", ["Qwen3"], indirect=True, scope="module")
def test_prefix_cache_and_chunked_prefill(case, monkeypatch):
    """A second server with both: it keeps refusing whole samples, gives rows as it computes them,
    and these are the stored ones.
    """
    with server_up(
        dataclasses.replace(case.config, run_name="full"), tied=True, chunk_tok=CHUNK_TOK
    ) as second:
        status = second.status()
        assert status["radix_cache"] and status["chunked_prefill"]
        served = ask_full(
            second,
            case.samples,
            case.store.boundaries,
            {id: e.served for id, e in case.evidence.items()},
        )
        for id, sample in case.samples.items():
            T, states = len(sample["input_ids"]), served[id].states
            assert states["prefix cache"][0].tolist() == list(range(T // 2, T)), (
                "the first half came from the cache, the rest was computed"
            )
            assert (
                states["chunked prefill"][0].tolist()[-1] == T // 2 - 1
                and len(states["chunked prefill"][0]) > CHUNK_TOK
            )
        tests = case.examine(
            case.samples,
            {id: dataclasses.replace(e, served=served[id]) for id, e in case.evidence.items()},
        )
        assert tests["serving"].ok and len(tests["serving"].rows) == 4 * 4, tests["serving"].detail
        body = {
            "input_ids": next(iter(case.samples.values()))["input_ids"].tolist(),
            "sampling_params": {"max_new_tokens": 1, "custom_params": {"eyas_capture": "x"}},
        }
        answer = httpx.post(f"{second.url}/generate", timeout=120, json=body).json()
        assert (
            "prefix cache or chunked prefill is on"
            in answer["meta_info"]["eyas_capture"][0]["error"]
        )
        monkeypatch.setattr(
            eyas.parity.certify, "server_up", lambda *args, **kwargs: contextlib.nullcontext(second)
        )
        record = certify(case.config, case.server, case.store, case.target, case.prompts, full=True)
    assert record["passed"] and {row["how"] for row in record["tests"][3]["rows"]} == {
        "another batch",
        "decoding",
        "prefix cache",
        "chunked prefill",
    }


@pytest.mark.server
def test_a_store_of_normed_last_states(case):
    """As some imports are: its last boundary is compared after the norm, and one before the norm is
    caught.
    """
    last, head = (
        case.target.n_blocks,
        NormedHead(case.head.norm_weight, case.head.lm_head, case.head.eps),
    )
    evidence = {id: after_norm(e) for id, e in case.evidence.items()}
    normed = {
        id: {
            **s,
            "states": s["states"] | {last: case.head.normed(s["states"][last]).to(torch.bfloat16)},
        }
        for id, s in case.samples.items()
    }
    for samples, ok in ((normed, True), (case.samples, False)):
        tests = {v.name: v.ok for v in examine(samples, evidence, head, case.dtype, case.tokenizer)}
        assert [tests[name] for name in ("text", "head", "boundary", "serving")] == [
            True,
            ok,
            ok,
            ok,
        ]


# ---- faults


@pytest.mark.server
@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_fault(case, altered, fault):
    found = altered[fault]
    if fault == "template mismatch":
        tests = {"text": text_test(found.samples, found.evidence, case.tokenizer, {})}
    else:
        tests = case.examine(found.samples, found.evidence, found.dtype, found.head)
    assert tests[CAUGHT_BY[fault]].ok is False, (
        found.size,
        {name: v.detail for name, v in tests.items()},
    )


@pytest.mark.server
@pytest.mark.parametrize("fault", WRONG_HEADS)
def test_a_wrong_copied_head_does_not_widen_its_own_limit(case, altered, fault, monkeypatch):
    """The limits are those of the right head; and most faults are found from log-probabilities
    alone, without a look at the weights.
    """
    right = case.examine(case.samples)["head"].rows[0]
    found = altered[fault]
    wrong = case.examine(found.samples, head=found.head)["head"]
    assert (
        not wrong.ok
        and ("head" in wrong.detail or "norm" in wrong.detail)
        and "verify --repair" in wrong.detail
    )
    assert [wrong.rows[0][name] for name in ("limit_p50", "limit_p90")] == [
        right[name] for name in ("limit_p50", "limit_p90")
    ]
    monkeypatch.setattr(ReferenceHead, "differences", lambda *_: [])
    seen_without_weights = not case.examine(found.samples, head=found.head)["head"].ok
    assert seen_without_weights or fault == "final norm with another epsilon", wrong.detail


@pytest.mark.server
def test_training_refuses_a_head_that_was_exchanged_and_verify_mends_it(case, capsys):
    """Whole files with wrong weights: the certificate fails, an older certificate does not cover
    them, and `verify --repair` brings the target's own back.
    """
    config = dataclasses.replace(
        case.config,
        run_name="head",
        server_url=case.server.url,
        train_samples=4,
        heldout_samples=1,
        epochs=1.0,
        draft_vocab_size=256,
    )
    extract(config, [case.server], case.target, case.prompts)
    store = Store.open(config.store_dir)
    assert certify(config, case.server, store, case.target, case.prompts)["passed"]
    path = config.store_dir / "head.safetensors"
    before = path.read_bytes()
    head = store.head()
    weights = {
        "norm_weight": head.norm_weight.bfloat16(),
        "lm_head": head.lm_head.roll(1, 0).bfloat16(),
    }
    write_safetensors(path, weights, {"content_hash": content_hash(weights)})
    with pytest.raises(EyasError, match="made for another head.safetensors.*python -m eyas parity"):
        train(config, Store.open(config.store_dir), case.target)
    record = certify(config, case.server, Store.open(config.store_dir), case.target, case.prompts)
    assert not record["passed"] and [t["name"] for t in record["tests"] if t["ok"] is False] == [
        "head"
    ]
    with pytest.raises(EyasError, match="did not pass: head"):
        train(config, Store.open(config.store_dir), case.target)
    arguments = ["--profile", "smoke"] + [
        word
        for name, value in (
            ("run_name", "head"),
            ("target", config.target),
            ("boundaries", "1,2,3"),
            ("train_samples", "4"),
            ("heldout_samples", "1"),
            ("max_length", "320"),
            ("context_tok", "1000"),
            ("shard_mib", "1"),
            ("server_url", case.server.url),
        )
        for word in ("-p", name, value)
    ]
    assert (
        main(["verify", *arguments]) == 1
        and "final norm and head are not the target's" in capsys.readouterr().out
    )
    assert main(["verify", "--repair", *arguments]) == 0
    assert (
        path.read_bytes() == before
        and certify(config, case.server, Store.open(config.store_dir), case.target, case.prompts)[
            "passed"
        ]
    )


@pytest.mark.server
def test_a_certificate_of_the_older_head_test_is_no_certificate(case):
    config = dataclasses.replace(case.config, run_name="parity")
    certify(config, case.server, case.store, case.target, case.prompts)
    record = read_json(certificate_path(case.store))
    write_json(certificate_path(case.store), record | {"format": "eyas-parity-1"})
    assert read_certificate(case.store) is None
    with pytest.raises(EyasError, match="from an older Eyas"):
        need_certificate(case.store, "parity")
    write_json(certificate_path(case.store), record)


@pytest.mark.server
def test_a_reference_that_is_far_from_itself_excuses_nothing(case):
    """As two loads of a target with missing weights are, each filled at random: the floor is wide,
    and the states would be within it.
    """
    noise = torch.Generator().manual_seed(7)
    evidence = {}
    for id, e in case.evidence.items():
        far = e.reference.rounded + e.reference.rounded.abs().mean(-1, keepdim=True) * torch.randn(
            e.reference.rounded.shape, generator=noise
        )
        far_logp = e.reference.rounded_logp + 2 * torch.randn(
            e.reference.rounded_logp.shape, generator=noise
        )
        evidence[id] = dataclasses.replace(
            e, reference=dataclasses.replace(e.reference, rounded=far, rounded_logp=far_logp)
        )
    tests = case.examine(case.samples, evidence)
    for name in ("head", "boundary"):
        assert tests[name].ok is False and "it is no reference" in tests[name].detail, tests[
            name
        ].detail


@pytest.mark.server
def test_ties_nearly_everywhere_are_no_agreement(case):
    """The server's first choices are another model's, and the reference is so rough that all of
    them are ties.
    """
    evidence = {}
    for id, e in case.evidence.items():
        rough = e.reference.exact_logp + torch.linspace(
            0, 8, e.reference.exact_logp.shape[1]
        ).expand(2, -1).clamp(max=0.4)
        rough[:, -1] += 40
        second = (e.served.top_ids + 1) % case.target.vocab_size
        served = dataclasses.replace(e.served, top_ids=second)
        evidence[id] = dataclasses.replace(
            e, served=served, reference=dataclasses.replace(e.reference, rounded_logp=rough)
        )
    verdict_of_head = case.examine(case.samples, evidence)["head"]
    numbers = verdict_of_head.rows[0]
    assert (
        numbers["agreeing"] + numbers["ties"] == numbers["positions"]
        and numbers["agreeing"] < numbers["positions"] / 2
    )
    assert verdict_of_head.ok is False


@pytest.mark.parametrize(
    "missing", ["lm_head.weight", "model.layers.2.mlp.down_proj.weight", "model.norm.weight"]
)
def test_the_reference_refuses_a_target_with_a_missing_weight(tmp_path, missing):
    """transformers would fill it at random, anew for each load."""
    folder = make_tiny_target(tmp_path / "model", seed=1)
    weights = load_file(folder / "model.safetensors")
    del weights[missing]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(EyasError, match=missing):
        HuggingFace(load_target(str(folder)), 1)


def test_a_head_that_caps_its_logits_is_refused(tmp_path):
    """Gemma 2's: a store's logits would not be the model's."""
    import transformers

    folder = make_tiny_target(tmp_path / "model", seed=1)
    config = read_json(folder / "config.json")
    shape = {
        name: config[name]
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    }
    model = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**shape, final_logit_softcapping=1.0, tie_word_embeddings=False)
    )
    model.save_pretrained(folder)
    target = load_target(str(folder))
    with pytest.raises(EyasError, match="it scales or caps them"):
        HuggingFace(target, 1)(torch.arange(3, 20), torch.arange(3, 19))


def test_the_certificate_says_what_it_cannot_see():
    few = unseen(12, 1048, in_graph=False)
    assert few[0].startswith(
        "12 of 1,048 samples were compared: a fault in 22% of the samples escapes in 5% "
        "of certificates"
    )
    assert 0.049 < (1 - 0.22) ** 12 < 0.052, "the number that the sentence gives"
    assert len(unseen(8, 8, in_graph=False)) == 1 and "decoding" in unseen(8, 8, in_graph=True)[-1]


@pytest.mark.server
@pytest.mark.parametrize(
    "fault", ["loss mask off by one, late", "loss mask off by one, early", "template mismatch"]
)
def test_text_faults_are_caught_without_a_prompt_set(case, altered, fault):
    unknown = {id: dataclasses.replace(e, expected=None) for id, e in case.evidence.items()}
    assert text_test(case.samples, unknown, case.tokenizer, {}).ok
    assert text_test(altered[fault].samples, unknown, case.tokenizer, {}).ok is False


@pytest.mark.server
def test_a_template_mismatch_with_the_states_of_its_own_tokens(case):
    """The states are right for those tokens, so only the text tells."""
    id, sample = next(iter(case.samples.items()))
    other = template_mismatch(sample, case.tokenizer)
    states, evidence = case.anew(other["input_ids"], case.evidence[id].expected)
    tests = case.examine({id: {**other, "states": states}}, {id: evidence})
    assert [name for name, v in tests.items() if v.ok is False] == ["text"]
    assert (
        text_test({id: sample}, case.evidence, case.tokenizer, {"template_hash": "of-another"}).ok
        is False
    )


@pytest.mark.server
def test_one_wrong_token_id(case):
    """One id in the middle is another than the states were computed from."""
    id, sample = next(iter(case.samples.items()))
    ids = sample["input_ids"].clone()
    ids[len(ids) // 2] = (ids[len(ids) // 2] + 7) % 500 + 3
    tests = case.examine(
        {id: {**sample, "input_ids": ids}}, {id: case.anew(ids, case.evidence[id].expected)[1]}
    )
    assert tests["boundary"].ok is False and tests["text"].ok is False


@pytest.mark.server
@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_states_of_a_fine_tuned_twin(case, dtype, tmp_path):
    """Every weight changed by 1 %: the states of one sample come from the twin's own forward pass
    in bfloat16.
    """
    twin = HuggingFace(case.target, 2)
    with torch.no_grad():
        for weight in twin.models[1].parameters():
            weight.mul_(
                1 + 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
            )
    samples = {}
    for id, sample in case.samples.items():
        rounded = twin(sample["input_ids"], case.evidence[id].served.top_ids).rounded
        samples[id] = {
            **sample,
            "states": {b: as_stored(rounded[b], dtype) for b in case.store.boundaries},
        }
    for id, sample in samples.items():  # any one of them is enough
        tests = case.examine({id: sample}, dtype=dtype)
        assert tests["boundary"].ok is False, tests["boundary"].detail
    own = {
        id: {
            **s,
            "states": {
                b: as_stored(case.evidence[id].reference.rounded[b], dtype)
                for b in case.store.boundaries
            },
        }
        for id, s in case.samples.items()
    }
    assert case.examine(own, dtype=dtype)["boundary"].ok, "the same with the weights unchanged"


def test_memory_of_the_reference(tmp_path, monkeypatch):
    """By parameters, in float32 and in bfloat16, however few bytes the files pack them into."""
    target = load_target(str(make_tiny_target(tmp_path / "model", n_blocks=2, seed=1)))
    n = sum(weight.numel() for weight in target.causal_lm(torch.float32).parameters())
    assert eyas.parity.references.n_parameters(target.folder) == n
    (tmp_path / "packed").mkdir()
    for name, weights in (
        (
            "a",
            {
                "up.weight_packed": torch.zeros(8, 4, dtype=torch.int32),
                "up.weight_scale": torch.zeros(8, 1).bfloat16(),
            },
        ),
        ("b", {"down.weight": torch.zeros(3, 5).to(torch.float8_e4m3fn)}),
    ):
        save_file(weights, tmp_path / "packed" / f"{name}.safetensors")
    assert eyas.parity.references.n_parameters(tmp_path / "packed") == 8 * 32 + 8 + 15, (
        "eight 4-bit weights in each int32"
    )
    monkeypatch.setattr(
        eyas.parity.references.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(available=6 * n - 1),
    )
    with pytest.raises(EyasError, match="the reference of model takes"):
        HuggingFace(target, 1)


# ---- the certificate as a condition


@pytest.mark.server
def test_training_asks_for_a_certificate_of_these_very_data(case):
    config = dataclasses.replace(
        case.config,
        run_name="asks",
        server_url=case.server.url,
        train_samples=4,
        heldout_samples=1,
        epochs=1.0,
        draft_vocab_size=256,
    )
    extract(config, [case.server], case.target, case.prompts)
    store = Store.open(config.store_dir)
    with pytest.raises(
        EyasError, match="has no parity certificate.*python -m eyas parity.*without_parity true"
    ):
        train(config, store, case.target)
    record = certify(config, case.server, store, case.target, case.prompts)
    assert record["passed"] and read_certificate(store) is not None
    stored = read_json(certificate_path(store))
    write_json(
        certificate_path(store),
        {
            **stored,
            "passed": False,
            "tests": [{**stored["tests"][0], "ok": False}, *stored["tests"][1:]],
        },
    )
    with pytest.raises(EyasError, match="did not pass: text"):
        train(config, store, case.target)
    write_json(certificate_path(store), stored)
    train(config, store, case.target)
    more = dataclasses.replace(config, train_samples=6)
    extract(more, [case.server], case.target, case.prompts)
    with pytest.raises(EyasError, match="made for other data"):
        train(more, Store.open(config.store_dir), case.target)
    shutil.rmtree(config.drafter_dir)
    train(dataclasses.replace(more, without_parity=True), Store.open(config.store_dir), case.target)


# ---- numbers with known answers


def test_distance_is_per_token():
    reference = torch.tensor([[1.0, -1.0, 2.0], [10.0, 0.0, 0.0]])
    assert distance(reference * 1.5, reference).tolist() == [0.5, 0.5]
    assert distance(torch.tensor([[0.0, 0.0, 0.0], [10.0, 0.0, 5.0]]), reference).tolist() == [
        1.0,
        0.5,
    ]


def test_match_names_the_nearest_and_the_lost_row():
    exact = (
        torch.eye(4).repeat(3, 1, 1) * torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    )  # [N+1 = 3, T = 4, H = 4]
    found = match(exact[1], exact, exact[1], b=1)
    assert (found.nearest, found.lost, float(found.error.max())) == (1, 0, 0.0)
    assert match(exact[2], exact, exact[1], b=1).nearest == 2
    rows = exact[1].clone()
    rows[2] = rows[1]
    assert (match(rows, exact, exact[1], b=1).nearest, match(rows, exact, exact[1], b=1).lost) == (
        1,
        1,
    )
    rows[2] = torch.nan
    assert match(rows, exact, exact[1], b=1).lost == 1
    twice = exact.clone()
    twice[0, 2] = twice[0, 1]  # the same token twice in a row: the same embedding, without rounding
    assert (
        match(twice[0], twice, twice[0], b=0).lost,
        match(twice[0].roll(1, 0), twice, twice[0], b=0).lost,
    ) == (0, 3)


def test_the_distance_survives_quantisation():
    """The mean of |Q(x) - Q(y)| over many values is that of |x - y|: a flipped code is as seldom as
    its step is wide.
    """
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=g)
    y = x * (1 + 0.01 * torch.randn(256, 512, generator=g))
    x[:, 0] = y[:, 0] = 8.0  # the same scale
    ratio = distance(as_stored(x, FP8), as_stored(y, FP8)).mean() / distance(x, y).mean()
    assert 0.9 < ratio < 1.1
