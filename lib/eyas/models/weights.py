"""Compare the weights of a model folder with those that its config.json asks for.

- transformers builds the model without memory for it (on the "meta" device), and its own loader
  takes the names and shapes of the safetensors headers. So renamed weights, fused experts, tied
  heads, and layers that only serve multi-token prediction are understood as that library
  understands them. No weight is read.
- A quantised weight counts as one weight, whose parts (`weight_packed`, `weight_scale`, ...) must
  all exist.
- Of a model that also sees or hears, only the language model and its head are compared: the
  hidden states come from these.
- Where transformers has no class for the model, `not_made` says so.
"""

import collections
import contextlib
import copy
import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

from eyas.errors import EyasError

Header = tuple[tuple[int, ...], str]  # shape and dtype, as safetensors writes them

QUANTISED = (
    "compressed-tensors",
    "fp8",
    "gptq",
    "awq",
    "mxfp4",
    "modelopt",
    "modelopt_fp4",
    "w8a8_int8",
    "w8a8_fp8",
    "bitsandbytes",
)
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
UNPACKED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")  # one code for each value: the shape is the weight's
CODES = re.compile(r"(?:\.weight_packed|\.qweight|_blocks|\.weight)$")
COMPANION = re.compile(
    r"(?:\.weight|\.input|\.output)?"
    r"_(?:scale|scale_inv|scale_2|global_scale|scales|shape|zero_point|g_idx)$"
    r"|\.(?:qzeros|scales|g_idx|SCB|weight_format)$"
    r"|\.weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\S+)$"
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a comparison: all is well where `faults` is empty.

    `misshaped` and `misplaced` are sentences; `tied` is None where no model could be built.
    """

    model: str = ""
    missing: tuple[str, ...] = ()
    misshaped: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()
    tied: bool | None = None
    not_made: str = ""
    lasting: bool = True  # a later try with the same files and packages gives the same

    @property
    def faults(self) -> tuple[str, ...]:
        """Return one sentence for each kind of fault."""
        sentences = []
        if self.missing:
            sentences.append(
                f"{_weights(len(self.missing))} that config.json asks for "
                f"{_are(self.missing)} missing: {few(self.missing)}"
            )
        if self.misshaped:
            sentences.append(
                f"{_weights(len(self.misshaped))} of another shape than config.json asks for: "
                f"{few(self.misshaped)}"
            )
        if self.misplaced:
            sentences.append(f"model.safetensors.index.json is wrong: {few(self.misplaced)}")
        return tuple(sentences)

    @property
    def expected(self) -> str:
        head = any(name.endswith("lm_head.weight") for name in self.missing)
        why = (
            " (tie_word_embeddings is false in config.json, or by default, "
            "so the head is a weight of its own)"
            if head
            else ""
        )
        model = self.model or "the model"
        return f"every weight of {model}, in its shape, in the folder's safetensors files{why}"

    def check(self, folder: Path) -> None:
        """Raise EyasError if there is a fault."""
        if self.faults:
            raise EyasError(f"{folder.name}: {'; '.join(self.faults)}", self.expected, COPY_COMMAND)


COPY_COMMAND = (
    "copy the model's folder again, config.json and all safetensors files, "
    "then python -m eyas doctor --target FOLDER"
)


def compare(folder: Path, config: dict, trust_remote_code: bool = False) -> Comparison:
    """Compare the names and shapes in a folder's safetensors files with those of its model.

    Raise EyasError if a file is torn.
    """
    headers, misplaced, twice = read_headers(folder)
    if _outside(misplaced):
        return Comparison(misplaced=misplaced)
    method = quantisation(config)
    if method and method not in QUANTISED:
        return Comparison(
            misplaced=misplaced,
            twice=twice,
            not_made=f"weights quantised by {method}: their names are not known here",
        )
    try:
        with _quiet():
            model = empty_model(folder, config, trust_remote_code)
            if isinstance(model, str):
                return Comparison(misplaced=misplaced, twice=twice, not_made=model)
            return dataclasses.replace(
                _judge(model, headers, bool(method)), misplaced=misplaced, twice=twice
            )
    except Exception as error:  # a model's own code, or a config.json that its class does not take
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Comparison(
            misplaced=misplaced,
            twice=twice,
            not_made=f"transformers could not build the model: {reason}",
            lasting=False,
        )


def read_headers(folder: Path) -> tuple[dict[str, Header], tuple[str, ...], tuple[str, ...]]:
    """Return each weight's header, the faults of the index, and names that several files hold."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    wrong = [
        f"{file} is not a file of the folder itself"
        for file in sorted(set(listed.values()))
        if Path(file).name != file
    ]
    if wrong:
        return {}, tuple(wrong), ()
    files = sorted(set(listed.values())) or sorted(
        path.name for path in folder.glob("*.safetensors")
    )
    headers: dict[str, Header] = {}
    places = collections.defaultdict(list)
    for file in files:
        if not (folder / file).is_file():
            wrong.append(f"its file {file} does not exist")
            continue
        try:
            with safe_open(folder / file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118  a safetensors file is no dict
                    header = shard.get_slice(name)
                    headers[name] = tuple(header.get_shape()), header.get_dtype()
                    places[name].append(file)
        except (OSError, SafetensorError) as error:
            raise torn(folder / file, error) from None
    for name, file in listed.items():
        if name in places and file not in places[name]:
            wrong.append(f"{name} is in {places[name][0]}, not in {file}")
    twice = [f"{name} in {' and '.join(held)}" for name, held in places.items() if len(held) > 1]
    return headers, tuple(wrong), tuple(twice)


def torn(path: Path, error: Exception) -> EyasError:
    """Return the error for a safetensors file that cannot be read."""
    return EyasError(
        f"{path.name} of {path.parent.name} can't be read: {error}",
        "a whole safetensors file",
        "copy or save the model again",
    )


def quantisation(config: dict) -> str:
    """Return the method of quantised weights, or an empty string."""
    settings = (
        config.get("quantization_config")
        or config.get("text_config", {}).get("quantization_config")
        or {}
    )
    return settings.get("quant_method", "") if isinstance(settings, dict) else str(settings)


def empty_model(folder: Path, config: dict, trust_remote_code: bool):
    """Return the unquantised model of a config.json on the meta device, or why there is none."""
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    name = (config.get("architectures") or ["no architecture"])[0]
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        cls = _class_by_type(config.get("model_type"))
    if cls is None and not config.get("auto_map"):
        return f"transformers {transformers.__version__} has no {name}"
    if cls is None and not trust_remote_code:
        return (
            f"{name} is Python in the model's folder, "
            "which does not run without -p trust_remote_code true"
        )
    with torch.device("meta"), no_init_weights():
        if cls is not None:
            return cls(_dense(cls.config_class.from_dict(_with_tie_of_text(config))))
        settings = _dense(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True))
        return transformers.AutoModelForCausalLM.from_config(settings, trust_remote_code=True)


def _with_tie_of_text(config: dict) -> dict:
    """Return a copy of config.json in which a wrapper ties its head as its language model does.

    The head is the language model's. Where only `text_config` says whether it is tied, the class of
    the wrapper would take its own default.
    """
    config = copy.deepcopy(config)
    text = config.get("text_config")
    if isinstance(text, dict) and "tie_word_embeddings" in text:
        config.setdefault("tie_word_embeddings", text["tie_word_embeddings"])
    return config


def _class_by_type(model_type: str | None):
    """Return transformers' class for a `model_type` whose architecture has another name there.

    The whole model comes before its text model alone.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    settings = CONFIG_MAPPING[model_type]
    for mapping in (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        if settings in mapping:
            return mapping[settings]
    return None


def _dense(settings):
    """Drop the quantisation, and name the family as its class does (it selects conversions)."""
    for part in (settings, settings.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        part.model_type = type(part).model_type or part.model_type
    return settings


def _judge(model, headers: dict[str, Header], quantised: bool) -> Comparison:
    """Give the headers to transformers' loader and say in the files' own names what it lacks."""
    import torch
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    names = Names(model)
    parts_missing = ()
    if quantised:
        headers, parts_missing = names.without_parts(headers)
    placed = {name: names.target(name) for name in headers}
    tensors = {name: torch.empty(shape, device="meta") for name, (shape, _) in headers.items()}
    settings = LoadStateDictConfig(device_map={"": "meta"}, weight_mapping=names.mapping)
    tied = dict(model.all_tied_weights_keys)
    info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
    wrong_shape = {target for target, *_ in info.mismatched_keys}
    bad = {*info.missing_keys, *wrong_shape, *info.conversion_errors} - set(tied)
    ignored = model._keys_to_ignore_on_load_missing or ()
    of_text = names.of_text()
    bad = {
        target
        for target in bad
        if of_text(target) and not any(re.search(pattern, target) for pattern in ignored)
    }
    missing, misshaped, unclear = names.explain(bad, headers, placed, set(info.conversion_errors))
    model._adjust_missing_and_unexpected_keys(info)
    unused = [
        name
        for name, (target, _) in placed.items()
        if target not in names.meta and target in info.unexpected_keys
    ]
    return Comparison(
        model=type(model).__name__,
        missing=(*missing, *parts_missing),
        misshaped=misshaped,
        unused=tuple(unused),
        tied=_head_tied(model, tied),
        not_made=f"transformers could not convert {few(unclear)}" if unclear else "",
    )


def _head_tied(model, tied: dict[str, str]) -> bool:
    """Return whether the head is the embedding, as the model's own class and config say."""
    head = model.get_output_embeddings()
    name = (
        next((name for name, module in model.named_modules() if module is head), "lm_head")
        if head is not None
        else "lm_head"
    )
    return f"{name}.weight" in tied


class Names:
    """The names of a model's weights, and how transformers gets from the names in files to them."""

    def __init__(self, model):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model = model
        self.meta = dict(model.state_dict())
        self.mapping = get_model_conversion_mapping(model, None, None)
        self.renamings = [one for one in self.mapping if isinstance(one, WeightRenaming)]
        self.converters = [one for one in self.mapping if isinstance(one, WeightConverter)]
        self.codes: dict[str, str] = {}  # weight -> the name of its codes, where it is quantised
        self._wanted: dict[str, dict[str, tuple[int, ...]]] | None = None

    def target(self, name: str) -> tuple[str, str | None]:
        """Return the model's weight that a name becomes, and the pattern of its conversion."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        target, pattern = rename_source_key(
            name, self.renamings, self.converters, prefix, self.meta
        )
        if target not in self.meta and name in self.meta:
            target, pattern = rename_source_key(name, [], [], prefix, self.meta)
        return target, pattern

    @property
    def wanted(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the names and shapes under which transformers would save each weight."""
        from transformers.core_model_loading import revert_weight_conversion

        if self._wanted is None:
            self._wanted = collections.defaultdict(dict)
            for name, tensor in revert_weight_conversion(self.model, self.meta).items():
                self._wanted[self.target(name)[0]][name] = tuple(tensor.shape)
        return self._wanted

    def without_parts(
        self, headers: dict[str, Header]
    ) -> tuple[dict[str, Header], tuple[str, ...]]:
        """Return the headers as if nothing were quantised, and the names of parts that are missing.

        A part is missing where more than half of the weights with the same kind of codes have it.
        """
        dense: dict[str, Header] = {}
        kinds: dict[
            str, tuple[str, str]
        ] = {}  # what the parts have in common in their names -> kind of codes
        companions = collections.defaultdict(set)
        for name, (shape, dtype) in headers.items():
            known = self.target(name)[0] in self.meta
            if not known and (part := COMPANION.search(name)) and not name.endswith("_blocks"):
                companions[name[: part.start()]].add(part[0])
                continue
            codes = CODES.search(name)
            if not codes or (known and dtype in PLAIN_DTYPES):
                dense[name] = shape, dtype
                continue
            stem = name[: codes.start()]
            kinds[stem] = codes[0], dtype
            whole = stem if codes[0] == "_blocks" else f"{stem}.weight"
            self.codes[whole] = name
            dense[whole] = (shape if dtype in UNPACKED_DTYPES else self.shape(whole, shape)), dtype
        missing = []
        for kind in set(kinds.values()):
            stems = [stem for stem, of in kinds.items() if of == kind]
            counts = collections.Counter(part for stem in stems for part in companions[stem])
            usual = [part for part, count in counts.items() if 2 * count > len(stems)]
            missing += [
                stem + part for stem in stems for part in usual if part not in companions[stem]
            ]
        return dense, tuple(missing)

    def shape(self, name: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the model asks of a weight in a file."""
        target, pattern = self.target(name)
        if target not in self.meta:
            return otherwise
        if pattern is None:
            return tuple(self.meta[target].shape)
        shapes = {
            shape
            for saved, shape in self.wanted[target].items()
            if self.target(saved)[1] == pattern
        }
        return shapes.pop() if len(shapes) == 1 else otherwise

    def explain(
        self,
        bad: set[str],
        headers: dict[str, Header],
        placed: dict[str, tuple[str, str | None]],
        failed: set[str],
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Return missing names, sentences about wrong shapes, and weights that neither explains."""
        missing, misshaped, unclear = [], [], []
        if not bad:
            return (), (), ()
        present = collections.defaultdict(dict)
        for name, (target, pattern) in placed.items():
            present[target][_key(name, pattern)] = name
        as_here = self.namer(present)
        for target in sorted(bad, key=_natural):
            whole = present[target].get(_key(target, None)) or next(
                (n for n, to in placed.items() if to == (target, None)), None
            )
            said = len(missing) + len(misshaped)
            if whole and headers[whole][0] != tuple(self.meta[target].shape):
                misshaped.append(_shapes(whole, headers[whole][0], tuple(self.meta[target].shape)))
            for name, shape in {} if whole else self.wanted[target].items():
                held = present[target].get(_key(name, self.target(name)[1]))
                if held is None:
                    missing.append(as_here(name))
                elif headers[held][0] != shape:
                    misshaped.append(_shapes(held, headers[held][0], shape))
            if said == len(missing) + len(misshaped):
                (unclear if target in failed or whole else missing).append(target)
        return tuple(missing), tuple(misshaped), tuple(unclear)

    def namer(self, present: dict[str, dict]) -> Callable[[str], str]:
        """Return a function that turns a name of transformers into the files' own style.

        The style is that of another block's weight, or else the usual prefix.
        """
        alike = {}
        prefixes = collections.Counter()
        for target, held in present.items():
            for (pattern, _), name in held.items():
                alike[_without_numbers(target), pattern] = self.codes.get(name, name)
            for name in self.wanted.get(target, ()):
                there = held.get(_key(name, self.target(name)[1]), "")
                if there.endswith(name):
                    prefixes[there.removesuffix(name)] += 1
        usual = prefixes.most_common(1)[0][0] if prefixes else ""

        def as_here(name: str) -> str:
            target, pattern = self.target(name)
            numbers = re.findall(r"\d+", name)
            other = alike.get((_without_numbers(target), pattern), "")
            if not other or len(re.findall(r"\d+", other)) != len(numbers):
                return usual + name
            return re.sub(r"\d+", lambda _: numbers.pop(0), other)

        return as_here

    def of_text(self) -> Callable[[str], bool]:
        """Return a function that tells whether a weight is of the language model or its head."""
        model = self.model
        parts = [model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()]
        prefixes = tuple(
            f"{name}."
            for name, module in model.named_modules()
            if name and any(module is part for part in parts)
        )
        if model.config is model.config.get_text_config() or not prefixes:
            return lambda target: True
        return lambda target: target.startswith(prefixes)


def _key(name: str, pattern: str | None) -> tuple:
    """Return what tells the sources of one weight apart: its pattern and numbers."""
    return pattern, tuple(re.findall(r"\d+", name))


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _shapes(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{name} {list(found)} instead of {list(wanted)}"


def _outside(misplaced: tuple[str, ...]) -> bool:
    return any("is not a file of the folder itself" in sentence for sentence in misplaced)


def _weights(count: int) -> str:
    return f"{count:,} weight{'s' if count > 1 else ''}"


def _are(names: tuple[str, ...]) -> str:
    return "are" if len(names) > 1 else "is"


def few(names: tuple[str, ...]) -> str:
    """Return the first four names and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4:,} more" if len(names) > 4 else "")


@contextlib.contextmanager
def _quiet():
    """Keep transformers from logging and drawing bars: nothing is computed here."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
