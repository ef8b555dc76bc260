"""Eyas: train EAGLE-3 drafters from the hidden states that a real SGLang server computes.

Axis names are the same everywhere: T tokens of one sample, S packed tokens, B boundaries, H hidden
size of the target, V target vocabulary, D draft vocabulary, K draft steps, N decoder blocks.
*Boundary* b is the residual stream that enters block b. Boundary N leaves the last block, before
the final norm.
"""

import warnings

# tqdm warns so in a notebook. Widgets are not installed: they do not show in a saved page.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = "0.1.0"
