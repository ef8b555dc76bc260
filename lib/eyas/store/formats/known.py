"""The foreign formats by name."""

from eyas.store.formats.specforge import SpecForge
from eyas.store.formats.speculators import Speculators
from eyas.store.formats.speculators_v1 import SpeculatorsV1

# A class per format. `numbers` ascending; `open(number)` maps a file without reading its states; `read(number)` is the sample
FORMATS = {"speculators-v1": SpeculatorsV1, "speculators": Speculators, "specforge": SpecForge}
