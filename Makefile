# Everything a developer runs. `make demo` and `make test` set up the machine themselves.
.PHONY: setup demo test lint full-test chaos clean

setup:
	@scripts/setup

demo: setup ## serve the built-in model with two replicas, ask it in every way, stop it
	@.venv/bin/python examples/demo.py

lint: setup ## style, types, and who may import whom
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

test: lint ## what CI runs
	.venv/bin/python -m pytest -q

full-test: lint ## the long forms of the checks, too, and property tests with new examples (about an hour on 2 cores)
	.venv/bin/python -m pytest -q --full

chaos: setup ## ten minutes of clients that ask while workers are killed under them; ROUTER=1: and the router
	.venv/bin/python -m tests.system.chaos $(if $(ROUTER),--router)

clean:
	rm -rf .venv build dist *.egg-info
