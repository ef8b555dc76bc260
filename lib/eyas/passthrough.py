"""Read the two settings that go to SGLang as they are: server_args and server_env.

`server_args` is a text of flags, `--stream-interval 8 --enable-nccl-nvls`. `server_env` is a text
of variables, `NCCL_PROTO=LL OMP_NUM_THREADS=2`. Both are split as a shell splits them. A flag or a
variable that capture depends on is refused by its name.
"""

import re
import shlex

# Eyas has a setting for each of these flags.
SETTING_OF_FLAG = {
    "--model-path": "target",
    "--model": "target",
    "--port": "port",
    "--device": "device",
    "--dtype": "dtype",
    "--tp-size": "tensor_parallel",
    "--tensor-parallel-size": "tensor_parallel",
    "--context-length": "context_tok",
    "--max-total-tokens": "max_total_tok",
    "--max-prefill-tokens": "max_prefill_tok",
    "--random-seed": "seed",
    "--trust-remote-code": "trust_remote_code",
}
# With these flags rows would be lost, come in pieces or be another model's, or the client would
# not reach the server.
REFUSED_FLAGS = (
    "--admin-api-key",
    "--api-key",
    "--chunked-prefill-size",
    "--config",
    "--cuda-graph-backend-prefill",
    "--cuda-graph-config",
    "--custom-weight-loader",
    "--data-parallel-size",
    "--decrypted-config-file",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--dp-size",
    "--enable-dynamic-chunking",
    "--enable-hicache",
    "--enable-hierarchical-cache",
    "--enable-lora",
    "--enable-mixed-chunk",
    "--enable-session-radix-cache",
    "--enable-torch-compile",
    "--enable-two-batch-overlap",
    "--forward-hooks",
    "--grpc-mode",
    "--help",
    "--host",
    "--is-embedding",
    "--json-model-override-args",
    "--kv-cache-dtype",
    "--load-format",
    "--lora-paths",
    "--model-impl",
    "--nnodes",
    "--pipeline-parallel-size",
    "--pp-size",
    "--quantization",
    "--quantize-and-serve",
    "--revision",
    "--skip-server-warmup",
    "--skip-tokenizer-init",
    "--sleep-on-idle",
    "--tokenizer-path",
    "--use-ray",
)
REFUSED_FAMILIES = (
    "--debug-tensor-dump-",
    "--disaggregation-",
    "--encoder-",
    "--radix-",
    "--smg-",
    "--speculative-",
    "--ssl-",
)
# Eyas sets these variables, or Python and the dynamic linker read them.
REFUSED_VARIABLES = (
    "EYAS_",
    "HF_HUB_OFFLINE",
    "LD_",
    "PATH",
    "PYTHON",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
    "SGLANG_PLATFORM",
    "SGLANG_PLUGINS",
    "TOKENIZERS_PARALLELISM",
)

Flags = dict[str, tuple[str, ...]]


def read_flags(text: str) -> Flags:
    """Return flag -> its values. Raise ValueError, which says what was expected."""
    flags: Flags = {}
    name = ""
    for word in _words(text):
        if not word.startswith("--"):
            if not name or not re.fullmatch(r"[^-].*|-[\d.]+", word):
                raise ValueError("flags of SGLang's server such as '--stream-interval 8'")
            flags[name] = (*flags[name], word)
            continue
        name, has_value, value = word.partition("=")
        _check_flag(name)
        if name in flags:
            raise ValueError(f"each flag once, and {name} is there twice")
        flags[name] = (value,) if has_value else ()
    return flags


def read_variables(text: str) -> dict[str, str]:
    """Return variable -> its value. Raise ValueError, which says what was expected."""
    variables: dict[str, str] = {}
    for word in _words(text):
        name, has_value, value = word.partition("=")
        if not has_value or not name.isidentifier():
            raise ValueError("variables such as 'NCCL_PROTO=LL OMP_NUM_THREADS=2'")
        if name.startswith(REFUSED_VARIABLES):
            raise ValueError(f"variables without {name}, which Eyas sets itself or depends on")
        if name in variables:
            raise ValueError(f"each variable once, and {name} is there twice")
        variables[name] = value
    return variables


def add_to(setting: str, text: str, more: str) -> str:
    """Return the text of `setting` with `more` added; what both name has the value of `more`."""
    if setting == "server_env":
        variables = read_variables(text) | read_variables(more)
        return shlex.join(f"{name}={value}" for name, value in variables.items())
    flags = read_flags(text) | read_flags(more)
    return shlex.join(word for name, values in flags.items() for word in (name, *values))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        raise ValueError("a text whose quotation marks are closed") from None


def _check_flag(name: str) -> None:
    """Raise ValueError for a flag that is refused, also where it is abbreviated.

    The server's parser takes `--hos` for `--host`.
    """
    for flag, setting in SETTING_OF_FLAG.items():
        if flag == name:
            raise ValueError(f"flags without {name}: the setting {setting} sets it")
    for flag in (*REFUSED_FLAGS, *SETTING_OF_FLAG):
        if flag.startswith(name):
            raise ValueError(f"flags without {name}: Eyas sets {flag} itself or depends on it")
    for family in REFUSED_FAMILIES:
        if name.startswith(family) or family.startswith(name):
            raise ValueError(f"flags without {name}: Eyas sets {family}* itself or depends on it")
