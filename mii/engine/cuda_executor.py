"""Computes steps on a GPU so that the host never stands between two of them.

What changes from step to step lives on the device, in one row for each slot: block table, computed
length, last token, and how the next one is drawn. A step of decodes is one CUDA graph that reads
and updates these rows; the host only says which slots take part. Its tokens reach the host while
the next step is already running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mii.attention.batch import RaggedBatch
from mii.engine.executor import Pending, sample_on_host
from mii.engine.mixed_step import MixedInputs, MixedSize, lay_out, mixed_sizes
from mii.engine.plan import StepPlan, StepResult
from mii.engine.runner import CausalModel
from mii.engine.sampler import Sampler, SamplingState
from mii.kernels.attention_prefill import prefill_rows
from mii.kernels.sampling_triton import SlotSampling, draw_tokens_cuda
from mii.models.progress import Progress


def graph_sizes(max_sequences: int) -> list[int]:
    """Return the batch sizes that decode graphs are captured for, ascending.

    Every size up to 16, then steps of 8, of 16 beyond 128 and of 32 beyond 256: padding costs at
    most an eighth.
    """
    sizes = [*range(1, 17), *range(24, 129, 8), *range(144, 257, 16), *range(288, 4097, 32)]
    fitting = [size for size in sizes if size < max_sequences]
    return [*fitting, max_sequences]


@dataclass(frozen=True)
class _Slots:
    """The device's state, one row for each slot; the last row is for padding."""

    tables: torch.Tensor  # int32 [slots + 1, blocks of the longest sequence]
    lengths: torch.Tensor  # int64 [slots + 1], computed tokens
    last_tokens: torch.Tensor  # int64 [slots + 1]
    prompt_lengths: torch.Tensor  # int64 [slots + 1]
    sampling: SlotSampling

    @staticmethod
    def create(slots: int, blocks: int, padding_block: int, device: torch.device) -> _Slots:
        tables = torch.zeros(slots + 1, blocks, dtype=torch.int32, device=device)
        tables[-1] = padding_block
        lengths, last, prompts = (
            torch.zeros(slots + 1, dtype=torch.int64, device=device) for _ in range(3)
        )
        return _Slots(tables, lengths, last, prompts, SlotSampling(slots + 1, device))


@dataclass(frozen=True)
class _Step:
    """Something to capture."""

    run: Callable[[], None]
    key: tuple[int, bool] | MixedSize


class CUDAExecutor:
    """An Executor on one GPU.

    Args:
        model: with its cache allocated, one block more than `num_blocks` for padding.
        max_slots: slots of the state manager.
        max_length: tokens of one sequence at most.
        num_blocks, block_size: of the cache.
        max_tokens: tokens of one step at most.
        max_sequences: sequences of one step at most.
        device: the GPU.
    """

    depth = 1

    def __init__(
        self,
        model: CausalModel,
        *,
        max_slots: int,
        max_length: int,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        max_sequences: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._device = device
        self._block_size = block_size
        self._padding = max_slots
        blocks = -(-max_length // block_size)
        self._slots = _Slots.create(max_slots, blocks, num_blocks, device)
        self._num_blocks = np.zeros(max_slots, dtype=np.int64)
        self._sampler = Sampler(model.vocab_size)
        self._sizes = graph_sizes(max_sequences)
        self._graphs: dict[tuple[int, bool] | MixedSize, torch.cuda.CUDAGraph] = {}
        self._tile_rows = prefill_rows(model.head_dim)
        self._mixed_sizes = mixed_sizes(max_tokens, max_sequences, self._tile_rows)
        room = 4 * max_tokens + 8 * max_sequences + 2 * self._mixed_sizes[-1].tiles
        self._mixed_inputs = torch.zeros(room + max_sequences, dtype=torch.int64, device=device)
        self._active = torch.full((max_sequences,), max_slots, dtype=torch.int64, device=device)
        self._active_host: tuple[int, ...] = ()
        self._sampled = torch.zeros(max_sequences, dtype=torch.int64, device=device)

    def model(self) -> CausalModel:
        return self._model

    def close(self) -> None:
        self._graphs.clear()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        self._take_in(plan, ())
        return self._model.forward(self._ragged_batch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan, states: Sequence[SamplingState]) -> Pending:
        self._take_in(plan, states)
        if any(state.needs_host for state in states):
            return self._launch_for_host(plan, states)
        if plan.num_decodes == len(plan.sequences):
            return self._launch_decodes(plan, states)
        return self._launch_mixed(plan, states)

    @torch.inference_mode()
    def capture(self, progress: Progress, kinds: Sequence[bool] = (True, False)) -> None:
        """Capture the graphs, the largest first: the smaller ones share its memory.

        Args:
            progress: told how far it is.
            kinds: of decode graphs: whether all draws are greedy.
        """
        steps = [
            *(_Step(partial(self._mixed, size), size) for size in self._mixed_sizes),
            *(
                _Step(partial(self._decode, size, greedy), (size, greedy))
                for size in self._sizes
                for greedy in kinds
            ),
        ]
        pool = None
        for index, step in enumerate(reversed(steps)):
            progress("capturing CUDA graphs", index / len(steps))
            step.run()  # compiles the kernels
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                step.run()
            pool = pool or graph.pool()
            self._graphs[step.key] = graph
        progress("capturing CUDA graphs", 1.0)

    def _launch_mixed(self, plan: StepPlan, states: Sequence[SamplingState]) -> Pending:
        size = next((s for s in self._mixed_sizes if s.fits(plan)), None)
        if size is None:  # more prompts at once than graphs are made for
            size = MixedSize(plan.num_tokens, len(plan.sequences), self._tile_rows)
        array = torch.from_numpy(lay_out(plan, size, self._padding))
        if self._device.type == "cuda":
            array = array.pin_memory()
        self._mixed_inputs[: size.total].copy_(array, non_blocking=True)
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        else:
            self._mixed(size)
        return self._pending(plan, self._sampled[: len(states)], states)

    def _mixed(self, size: MixedSize) -> None:
        """A step described by the array of inputs; it reads and writes nothing on the host."""
        state, block_size = self._slots, self._block_size
        inputs = MixedInputs.views(self._mixed_inputs, size)
        last = state.last_tokens[inputs.token_slots]
        blocks = state.tables[inputs.token_slots, inputs.positions // block_size].long()
        batch = RaggedBatch(
            token_ids=torch.where(inputs.token_ids < 0, last, inputs.token_ids),
            positions=inputs.positions,
            rope_lengths=inputs.rope_lengths,
            kv_slots=blocks * block_size + inputs.positions % block_size,
            query_starts=inputs.query_starts.int(),
            context_lengths=inputs.context_lengths.int(),
            block_tables=state.tables[inputs.slots],
            logits_rows=inputs.logits_rows,
            num_decodes=0,
            query_lengths=(),
            host_context_lengths=(),
            decode_lengths=inputs.decode_lengths.int(),
            query_tiles=(inputs.tile_sequences.int(), inputs.tile_starts.int()),
        )
        logits = self._model.forward(batch)
        state.lengths[inputs.slots] = inputs.context_lengths
        drawn = inputs.logits_slots
        in_answer = state.lengths[drawn] - state.prompt_lengths[drawn]
        tokens = draw_tokens_cuda(logits, drawn, in_answer, state.sampling)
        state.last_tokens[drawn] = tokens
        self._sampled[: size.sequences] = tokens

    def _launch_for_host(self, plan: StepPlan, states: Sequence[SamplingState]) -> Pending:
        logits = self._model.forward(self._ragged_batch(plan))
        pairs = [[s.slot for s in plan.sequences], [s.start + s.num_tokens for s in plan.sequences]]
        slots, lengths = self._to_device(np.array(pairs, dtype=np.int64))
        self._slots.lengths[slots] = lengths
        result = sample_on_host(plan, logits, states, self._sampler)
        drawn = [s.slot for s in plan.sequences if s.samples]
        slots, tokens = self._to_device(np.array([drawn, result.token_ids], dtype=np.int64))
        self._slots.last_tokens[slots] = tokens
        return lambda: result

    def _launch_decodes(self, plan: StepPlan, states: Sequence[SamplingState]) -> Pending:
        count = len(plan.sequences)
        size = next(size for size in self._sizes if size >= count)
        active = tuple(s.slot for s in plan.sequences) + (self._padding,) * (size - count)
        if active != self._active_host:
            self._active[:size].copy_(self._to_device(np.array(active, dtype=np.int64)))
            self._active_host = active
        greedy = all(state.params.greedy for state in states)
        graph = self._graphs.get((size, greedy))
        if graph is not None:
            graph.replay()
        else:
            self._decode(size, greedy)
        return self._pending(plan, self._sampled[:count], states)

    def _decode(self, size: int, greedy: bool) -> None:
        """One token for each of the active slots; all that it reads and writes is on the device."""
        state, active = self._slots, self._active[:size]
        positions = state.lengths[active]
        tables = state.tables[active]
        blocks = tables.gather(1, (positions // self._block_size)[:, None])[:, 0].long()
        batch = RaggedBatch(
            token_ids=state.last_tokens[active],
            positions=positions,
            rope_lengths=torch.maximum(state.prompt_lengths[active], positions + 1),
            kv_slots=blocks * self._block_size + positions % self._block_size,
            query_starts=self._active,  # decodes do not look at it
            context_lengths=(positions + 1).int(),
            block_tables=tables,
            logits_rows=None,
            num_decodes=size,
            query_lengths=(),
            host_context_lengths=(),
            decode_lengths=(positions + 1).int(),
        )
        logits = self._model.forward(batch)
        state.lengths[active] = positions + 1
        state.lengths[-1:].zero_()
        in_answer = positions + 1 - state.prompt_lengths[active]
        tokens = draw_tokens_cuda(logits, active, in_answer, state.sampling, greedy=greedy)
        state.last_tokens[active] = tokens
        self._sampled[:size] = tokens

    def _pending(
        self, plan: StepPlan, tokens: torch.Tensor, states: Sequence[SamplingState]
    ) -> Pending:
        """Start the tokens' way to the host; return what waits for them."""
        host, arrived = self._to_host(tokens)

        def result() -> StepResult:
            if arrived is not None:
                arrived.synchronize()
            ids = tuple(host.tolist())
            for state, token in zip(states, ids, strict=True):
                state.append(token)
            uids = tuple(s.uid for s in plan.sequences if s.samples)
            return StepResult(plan.step, uids, ids)

        return result

    def _take_in(self, plan: StepPlan, states: Sequence[SamplingState]) -> None:
        """Bring the plan's new blocks, and how new sequences draw, to the device."""
        rows: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for s in plan.sequences:
            have = 0 if s.first else int(self._num_blocks[s.slot])
            rows += [s.slot] * len(s.new_blocks)
            columns += range(have, have + len(s.new_blocks))
            blocks += s.new_blocks
            self._num_blocks[s.slot] = have + len(s.new_blocks)
        if rows:
            triplets = self._to_device(np.array([rows, columns, blocks], dtype=np.int64))
            self._slots.tables[triplets[0], triplets[1]] = triplets[2].int()
        first = [s for s in plan.sequences if s.first]
        if first:
            pairs = np.array([[s.slot for s in first], [s.rope_length for s in first]], np.int64)
            slots, prompts = self._to_device(pairs)
            self._slots.prompt_lengths[slots] = prompts
        # A sequence samples for the first time when its prompt is computed, or computed anew.
        sampling = (s for s in plan.sequences if s.samples)
        begin = [(s.slot, t) for s, t in zip(sampling, states, strict=False) if not s.from_device]
        if begin:
            self._set_sampling(begin)

    def _set_sampling(self, begin: Sequence[tuple[int, SamplingState]]) -> None:
        slots = self._to_device(np.array([slot for slot, _ in begin], dtype=np.int64))
        params = [state.params for _, state in begin]
        floats = self._to_device(
            np.array([[p.temperature, p.top_p, p.min_p] for p in params], dtype=np.float32).T
        )
        integers = self._to_device(
            np.array([[s.seed, s.choice, s.params.top_k] for _, s in begin], dtype=np.int64).T
        )
        sampling = self._slots.sampling
        sampling.temperature[slots], sampling.top_p[slots], sampling.min_p[slots] = floats
        sampling.seed[slots] = integers[0]
        sampling.choice[slots] = integers[1].int()
        sampling.top_k[slots] = integers[2].int()

    def _ragged_batch(self, plan: StepPlan) -> RaggedBatch:
        """Lay out a step that has prompts in it; ids still on the device stay there."""
        sequences, size = plan.sequences, self._block_size
        counts = np.array([s.num_tokens for s in sequences], dtype=np.int64)
        starts = np.array([s.start for s in sequences], dtype=np.int64)
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        total = int(query_starts[-1])
        of_token = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(total) - (query_starts[:-1] - starts)[of_token]
        prompts = np.array([s.rope_length for s in sequences], dtype=np.int64)
        known = [i for s in sequences for i in (s.token_ids or (-1,))]
        packed = self._to_device(
            np.stack(
                (
                    np.array(known, dtype=np.int64),
                    positions,
                    np.maximum(prompts[of_token], positions + 1),
                    of_token,
                )
            )
        )
        contexts = starts + counts
        rows = (query_starts[1:] - 1)[[s.samples for s in sequences]]
        lists = [query_starts, contexts, np.array([s.slot for s in sequences]), rows]
        small = self._to_device(np.concatenate(lists).astype(np.int64))
        n = len(sequences)
        device_starts, device_contexts, slots, device_rows = small.split((n + 1, n, n, len(rows)))
        tables = self._slots.tables[slots, : -(-int(contexts.max()) // size)]
        token_ids, device_positions, rope_lengths, device_of_token = packed
        last = self._slots.last_tokens[slots][device_of_token]
        blocks = tables[device_of_token, device_positions // size].long()
        return RaggedBatch(
            token_ids=torch.where(token_ids < 0, last, token_ids),
            positions=device_positions,
            rope_lengths=rope_lengths,
            kv_slots=blocks * size + device_positions % size,
            query_starts=device_starts.int(),
            context_lengths=device_contexts.int(),
            block_tables=tables,
            logits_rows=device_rows,
            num_decodes=plan.num_decodes,
            query_lengths=tuple(counts.tolist()),
            host_context_lengths=tuple(contexts.tolist()),
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":  # the tests', where kernels run in Triton's interpreter
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Start a copy to the host; the event says when it has arrived."""
        if self._device.type == "cpu":
            return tensor.clone(), None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived
