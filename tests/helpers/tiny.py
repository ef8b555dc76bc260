"""A tiny target for unit tests: a random Llama (or Qwen3, or a mixture of experts) with a
byte-level BPE tokenizer, made in about a second.

It is a complete Hugging Face folder (ChatML tokens, SmolLM2's chat template, untied head,
bfloat16), so Hugging Face, `eyas.models.target` and SGLang load it like any other. Norm weights are
random too: one left at 1 would hide a norm that is forgotten.
"""

from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2 as in SmolLM2

# SmolLM2-135M-Instruct's own; tests/test_target.py compares it with the converted folder's.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' "
    "%}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' "
    "}}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What the tokenizer's merges are learnt from: enough for 377 merges beside the 256 bytes and the
# special tokens.
TEXT = """You are a helpful AI assistant named SmolLM, trained by Hugging Face. system user \
assistant
A young eagle leaves its nest before it can hunt, and someone has to teach it what the old bird \
knows already. The teacher flies
slowly and says every word aloud; the pupil listens, guesses the next three words, and is told at \
once which of them were right.
Write a short letter to a neighbour about the broken fence. Explain why the sky is blue during the \
day but red in the evening.
What is the difference between a list and a tuple in Python? Give me five ideas for dinner with \
rice, beans, onions and cheese.
Translate this sentence into French, then count how many letters it has. My train departs at noon; \
when should I leave home?
def mean(values): return sum(values) / len(values)   # of numbers, never of nothing
Thank you very much for your question! Here are some simple steps: first, open the window; second, \
boil water; third, wait."""

# What a family's configuration has beyond a Llama's. DeepSeek's: SGLang asks for yarn, and for
# moe_layer_freq, scoring_func and topk_method, which transformers has no use for.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
FAMILIES = {
    "Qwen3Moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "DeepseekV3": dict(
        num_key_value_heads=4,
        head_dim=8,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        num_nextn_predict_layers=0,
        rope_parameters=YARN,
        moe_layer_freq=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    ),
}


def make_tiny_target(
    folder,
    n_blocks: int = 4,
    hidden: int = 64,
    vocab: int = 512,
    seed: int = 0,
    family: str = "Llama",
) -> Path:
    """Write the target into `folder` (created) and return it. `hidden` is a multiple of 32, `vocab`
    at most 600; the same seed gives the same bytes.

    family "Qwen3" has norms on queries and keys too, "Qwen3Moe" a mixture of experts besides;
    "DeepseekV3" has latent attention, yarn, a dense block and then experts, with one that is
    shared, in the shape of DeepSeek-V3 and Kimi-K2.5.
    """
    import torch
    import transformers

    folder = Path(folder)
    tokenizer = _tokenizer(vocab)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=n_blocks,
        num_attention_heads=hidden // 16,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **({"num_key_value_heads": hidden // 32, "head_dim": 16} | FAMILIES.get(family, {})),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                else:
                    weight.normal_(
                        std=1.0 if "embed" in name else weight.shape[-1] ** -0.5
                    )  # every block and token matters
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(vocab: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if backend.get_vocab_size() != vocab:
        raise ValueError(f"TEXT gives {backend.get_vocab_size()} tokens, {vocab} were asked for")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[2],
        unk_token=SPECIAL[0],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
