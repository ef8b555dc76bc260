"""Eyas: train EAGLE-3 drafters from the hidden states that a real SGLang server computes.

Axis names, fixed everywhere: T tokens of one sample, S packed tokens, B boundaries kept, H target hidden size,
V target vocabulary, D draft vocabulary, K draft steps, N decoder blocks of the target.
*Boundary* b is the residual stream entering block b; N is what leaves the last block, before the final norm.
"""

import warnings

warnings.filterwarnings(
    "ignore", message="IProgress not found"
)  # tqdm's, in a notebook: widgets are not installed on purpose, they do not show in a saved page

__version__ = "0.1.0"
