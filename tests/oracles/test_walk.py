"""Walk the folder of recordings and replay every case of a method that we claim.

A recorded method that we do not offer is reported as skipped; one that we offer, under its own name or another, but
that the mapping cannot reach, fails.
"""

import pytest

import kvfoundry

from . import answers
from .cases import Case, find_cases, oracle_root
from .evaluation import CHECKS
from .mapping import CLAIMS, Parameters, Unmapped, claim_of, recipe_for
from .replay import replay

ROOT = oracle_root()
CASES = find_cases(ROOT) if ROOT.is_dir() else []


def test_the_walk_finds_cases() -> None:
    """A folder that exists and holds nothing is a mistake, not a pass."""
    if not ROOT.is_dir():
        pytest.skip(f"no folder of recordings at {ROOT}; name one with KVFOUNDRY_ORACLES")
    assert CASES, f"{ROOT} holds no case.json"


@pytest.mark.parametrize("case", CASES, ids=lambda case: "/".join((*case.key, case.case_id)))
def test_recorded_case(case: Case) -> None:
    check = (CHECKS | answers.CHECKS).get(case.folder.parts[-2:])
    if check is not None:
        check(case.file)
        return
    claim = claim_of(case.folder.parts, kvfoundry.methods())
    if claim is None:
        pytest.skip(f"not claimed yet: {'/'.join(case.key)}")
    reason = claim.unlike(case.entry)
    if reason is not None:
        pytest.skip(reason)
    replay(case, claim)


def test_a_method_that_is_offered_but_not_mapped_fails() -> None:
    with pytest.raises(Unmapped, match="snapkv is offered"):
        claim_of(("eviction", "elsewhere", "snap_kv"), kvfoundry.methods())
    with pytest.raises(Unmapped, match="l2norm is offered"):
        claim_of(("eviction", "elsewhere", "knorm"), kvfoundry.methods())
    assert claim_of(("eviction", "elsewhere", "unheard_of"), kvfoundry.methods()) is None


def test_a_parameter_without_mapping_fails() -> None:
    key = ("eviction", "kvpress", "tova")
    entry = {"params": {"compression_ratio": 0.5, "temperature": 2.0}, "tensors": {}}
    with pytest.raises(Unmapped, match="temperature"):
        recipe_for(Case(key, ROOT, "made up", entry), CLAIMS[key], 128)
    with pytest.raises(Unmapped, match="no parameter 'n_sink'"):
        Parameters({}).take("n_sink")
