# make demo: from nothing to reports/index.html. Everything runs in .venv, which the first target that needs it makes.

# The first of these that is Python 3.11; name another with `make demo PYTHON=/opt/python3.11/bin/python3`.
IS_3_11 = -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
PYTHON = $(shell for p in python3.11 python3; do $$p $(IS_3_11) && echo $$p && break; done)
P = demo

# Notebooks run on the venv's own kernel, whatever lies in the user's home.
export JUPYTER_PREFER_ENV_PATH = 1

.PHONY: help demo report lint test test-unit test-slow lab doctor clean

help:
	@echo "make demo            the whole road at demo size; opens with reports/index.html (20 minutes on 2 cores, set-up included)"
	@echo "make report P=smoke  the same with another profile of notebooks/profiles; what is up to date is not run again (A=--all, A='--from 04': it is)"
	@echo "make lint            style and imports, the first part of make test (10 seconds)"
	@echo "make test            what every change has to pass, with real servers and kernels (15 minutes on 2 cores, set-up included)"
	@echo "make test-unit       the part of it without server, kernel or Ray (3 minutes)"
	@echo "make test-slow       the rest: SmolLM2 through all notebooks, more target families, killed servers (25 minutes)"
	@echo "make lab             JupyterLab on the notebooks"
	@echo "make doctor          is everything here, and what to do where it is not"
	@echo "make clean           remove .venv and caches; data/ and reports/ stay"

demo: .venv/.ready
	.venv/bin/python -m eyas report --profile demo

report: .venv/.ready
	.venv/bin/python -m eyas report --profile $(P) $(A)

# Two processes of tests; each file in one of them. The tiers are marks: CONTRIBUTING.md.
TESTS = .venv/bin/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

test: .venv/.ready lint
	$(TESTS)

test-unit: .venv/.ready
	$(TESTS) -m "not slow and not server and not kernel"

test-slow: .venv/.ready
	$(TESTS) -m slow

# Through python, not by the scripts of .venv/bin: these name the folder that .venv was made in.
lint: .venv/.ready
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

lab: .venv/.ready
	.venv/bin/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

doctor: .venv/.ready
	.venv/bin/python -m eyas doctor

# A copied or moved .venv still imports the folder that it was made in; the stamp names it.
ifneq ($(shell cat .venv/.ready 2>/dev/null),$(CURDIR))
$(shell rm -f .venv/.ready)
endif

OR_SAY = || { echo "eyas: the packages could not be installed, see above; expected a package index that can be reached and 8 GB free; next: the same make again, it goes on" >&2; exit 2; }

# The stamp comes last: a .venv without it was interrupted, and the same command completes it. `pip -qq` says only what failed.
# --no-deps: the lock is complete, and SGLang's own dependencies would bring its GPU kernels (requirements/gpu.txt).
# A package that pip was killed in looks installed to it, though files are missing; INSTALLER, which pip writes at the end, tells.
.venv/.ready: requirements/cpu.txt pyproject.toml $(wildcard patches/*/pyproject.toml)
	@$(or $(PYTHON),false) $(IS_3_11) || { echo "eyas: no Python 3.11 as $(or $(PYTHON),python3.11 or python3); expected one; next: install it" \
		"(Debian: apt-get install python3.11-venv), use conda (environment.yml), or make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@rm -f $@
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing the locked packages into .venv (some minutes the first time) ..."
	@for d in .venv/lib/python3.11/site-packages/*.dist-info; do test -s "$$d/INSTALLER" || rm -rf "$$d"; done
	@.venv/bin/python -m pip install -qq --no-deps -r requirements/cpu.txt $(OR_SAY)
	@.venv/bin/python -m pip install -qq --no-deps --no-build-isolation -e . -e patches/capture -e patches/cpu $(OR_SAY)
	@echo "$(CURDIR)" > $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache lib/*.egg-info patches/*/*.egg-info
	find lib tests notebooks patches -name __pycache__ -prune -exec rm -rf {} +
