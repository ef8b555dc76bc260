"""The foreign formats by name."""

from eyas.store.formats.specforge import SpecForge
from eyas.store.formats.speculators import Speculators
from eyas.store.formats.speculators_v1 import SpeculatorsV1

# One class a format. `numbers`: the samples, ascending. `open(number)` maps a file without reading
# its states. `read(number)` reads the sample.
FORMATS = {"speculators-v1": SpeculatorsV1, "speculators": Speculators, "specforge": SpecForge}
