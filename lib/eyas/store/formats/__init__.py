"""Other projects' files of hidden states, out of a store and into one, a sample at a time.

    python -m eyas data export --to specforge --out FOLDER --profile demo
    python -m eyas data import --from speculators-v1 FOLDER -p target FOLDER -p boundaries '[3, 16, 28]' -p run_name NAME

    speculators-v1  speculators 0.3 and 0.4: data_{i}.pt, sample_lengths.json, data_config.json         last state before the final norm
    speculators     speculators >= 0.5: hidden_states/hs_{i}.safetensors and an Arrow data set          last state before the final norm
    specforge       SpecForge: rows_{g}-{g+2000}/data_{i}.ckpt (reads .ckpt.gz too)                     last state after the final norm

What each file holds was read in speculators 0.3.0 (`train/data.py`, `data_generation/config_generator.py`), speculators 0.9.0 (`train/data.py`,
`hs_connectors/transfer.py`) and specforge 0.2.0 (`runtime/data_plane/offline_reader.py`); tests/test_formats.py has their own readers read ours.

No file is unpickled beyond tensors, none outside the named folder is read. A state after the final norm cannot be turned back, so the manifest of
an import says what its last state is, and `Store.head()` norms accordingly.
"""
