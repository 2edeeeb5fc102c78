"""A plan survives the way to another rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mii.engine.plan import PlannedSequence, StepPlan

ids = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
planned = st.builds(
    PlannedSequence,
    uid=st.integers(0, 2**63 - 1),
    slot=st.integers(0, 4095),
    start=st.integers(0, 2**31 - 1),
    num_tokens=st.integers(1, 2**20),
    token_ids=ids,
    new_blocks=ids,
    rope_length=st.integers(0, 2**31 - 1),
    samples=st.booleans(),
    from_device=st.booleans(),
    first=st.booleans(),
)


@given(
    st.builds(
        StepPlan,
        step=st.integers(0, 2**62),
        sequences=st.lists(planned, max_size=5).map(tuple),
        num_decodes=st.integers(0, 5),
    )
)
def test_decoding_gives_what_was_encoded(plan: StepPlan) -> None:
    assert StepPlan.from_bytes(plan.to_bytes()) == plan
