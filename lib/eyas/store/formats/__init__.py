"""Other projects' files of hidden states, exported from a store and imported into one.

    python -m eyas data export --to specforge --out FOLDER --profile demo
    python -m eyas data import --from speculators-v1 FOLDER -p target FOLDER \\
        -p boundaries '[3, 16, 28]' -p run_name NAME

    speculators-v1  speculators 0.3 and 0.4; last state before the final norm
                    data_{i}.pt, sample_lengths.json, data_config.json
    speculators     speculators >= 0.5; last state before the final norm
                    hidden_states/hs_{i}.safetensors and an Arrow data set
    specforge       SpecForge; last state after the final norm
                    rows_{g}-{g+2000}/data_{i}.ckpt (.ckpt.gz is read too)

- The layouts were read in speculators 0.3.0 (`train/data.py`,
  `data_generation/config_generator.py`), speculators 0.9.0 (`train/data.py`,
  `hs_connectors/transfer.py`) and specforge 0.2.0
  (`runtime/data_plane/offline_reader.py`). In tests/test_formats.py their readers read our files.
- Nothing but tensors is unpickled, and no file outside the named folder is read.
- The final norm cannot be undone. So the manifest of an import says whether its last states are
  normed, and `Store.head()` norms accordingly.
"""
