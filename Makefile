# make demo   set up .venv, then put some questions to the service on the bundled model
# make test   set up .venv, then run the tests, file by file in two processes
#             (make test ARGS="-m slow", WORKERS=0 for one process)
# make lint   set up .venv, then check style, types and import contracts
# make cuda   set up .venv, then compile kernels and steps for CUDA without a GPU
#
# PYTHON=/path/to/python3.12 chooses the interpreter of a new .venv.

VENV := .venv
WORKERS := 2
READY := $(VENV)/.ready

.PHONY: demo test lint cuda venv
demo: venv
	@$(VENV)/bin/k3jax demo

test: venv
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

lint: venv
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/basedpyright
	$(VENV)/bin/lint-imports

cuda: venv
	@scripts/cuda_compile.sh

venv: $(READY)

# $(READY) is written last and holds the folder's path: an interrupted set-up leaves none, and one
# in a moved folder or of a removed interpreter does not match. Both start again from nothing; a
# changed dependency updates the .venv in place, again and again until that succeeds.
ifneq ($(shell $(VENV)/bin/python -c 'print(open("$(READY)").read())' 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
NEW_VENV = python=$$(scripts/find_python.sh) && "$$python" -m venv --clear $(VENV)
endif

# PIP_CONSTRAINT, unlike pip's -c, also pins what the build of k3jax itself installs.
$(READY): pyproject.toml constraints.txt
	@$(NEW_VENV)
	@echo "Setting up $(VENV) (a minute or two; later runs skip this)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
	    $(VENV)/bin/python -m pip install --no-input --editable ".[dev,train]"
	@printf '%s' "$(CURDIR)" > $@
