"""The connector with vLLM's own classes and no server: what it refuses, what it tells the workers, and its numbers.

Needs an environment with vLLM: `make test-vllm`.
"""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace

import pytest
import torch
from integrations.vllm_connector.fakes import request

from kvfoundry.chunks import Identity
from kvfoundry.integrations.vllm.blocks import OrderedBlocks
from kvfoundry.integrations.vllm.loading import slot_numbers
from kvfoundry.integrations.vllm.messages import Held, Span, WorkerCard, span_key
from kvfoundry.integrations.vllm.packing import LayerShape
from kvfoundry.integrations.vllm.serving import Serving
from kvfoundry.integrations.vllm.settings import connector_settings

from .servers import needs_vllm

pytestmark = needs_vllm
BLOCK = 32


@pytest.fixture
def vllm():
    """Modules of vLLM that tests look into, and the lines that the connector says."""
    connector = importlib.import_module("kvfoundry.integrations.vllm.connector")
    return SimpleNamespace(
        connector=connector,
        cache=importlib.import_module("vllm.v1.kv_cache_interface"),
        roles=importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole,
        config=importlib.import_module("vllm.config"),
    )


@pytest.fixture
def lines(vllm, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(vllm.connector, "say", said.append)
    return said


def full(vllm, **changed):
    return vllm.cache.FullAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32, **changed}
    )


def groups(vllm, *specs):
    made = [vllm.cache.KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    return vllm.cache.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=made)


def config(vllm, store: str, **settings):
    told = Serving("m", connector_settings({"store": store, "span": 64, **settings})).transfer_config
    return SimpleNamespace(
        kv_transfer_config=vllm.config.KVTransferConfig(**told),
        cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=False, cache_dtype="auto"),
        parallel_config=vllm.config.ParallelConfig(),
        model_config=SimpleNamespace(),
    )


def both(vllm, cache, store: str, **settings):
    made = vllm.connector.KVFoundryConnector
    return [made(config(vllm, store, **settings), role, cache) for role in (vllm.roles.SCHEDULER, vllm.roles.WORKER)]


def computed_in_full(scheduler, worker) -> bool:
    """After the two have met, as vLLM lets them."""
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    asked = request("a", 200)
    answer = scheduler.get_num_new_matched_tokens(asked, 0)
    scheduler.update_state_after_alloc(asked, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    done = scheduler.request_finished_all_groups(asked, ([1, 2],))
    worker.start_load_kv(SimpleNamespace(attn_metadata=None))
    worker.wait_for_layer_load("layer.0")
    worker.wait_for_save()
    nothing = worker.get_finished({"a"}) == (None, None) and worker.get_block_ids_with_load_errors() == set()
    for each in (scheduler, worker):
        each.shutdown()
    return answer == (0, False) and done == (False, None) and nothing


def test_hybrid_models_are_computed_in_full(vllm, lines, tmp_path):
    window = vllm.cache.SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32, sliding_window=64
    )
    state = vllm.cache.MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
    for specs in ((full(vllm), window), (full(vllm), state), (window,), (state,)):
        lines.clear()
        scheduler, worker = both(vllm, groups(vllm, *specs), f"disk:{tmp_path}:1GiB")
        worker.register_kv_caches({"layer.0": torch.zeros(8, 2, BLOCK, 128)})
        assert computed_in_full(scheduler, worker)
        assert len(lines) == 1 and "serving without the store: its layers keep" in lines[0]


def test_latent_attention_is_computed_in_full(vllm, lines, tmp_path):
    latent = vllm.cache.MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    scheduler, worker = both(vllm, groups(vllm, latent), f"disk:{tmp_path}:1GiB")
    worker.register_kv_caches({"layer.0": torch.zeros(8, 1, BLOCK, 576)})
    assert computed_in_full(scheduler, worker) and len(lines) == 1 and "MLAAttentionSpec" in lines[0]


@pytest.mark.parametrize(
    "backend, cache, says",
    [
        ("ROCM_ATTN", torch.zeros(8, 2, BLOCK, 128), "ROCM_ATTN on cpu is not served; use one of CPU_ATTN"),
        ("CPU_ATTN", torch.zeros(8, 2, BLOCK, 96), "does not hold 2 heads of 128 numbers"),
        ("CPU_ATTN", torch.zeros(8, 2, BLOCK, 128).to(torch.float8_e5m2), "kv-cache-dtype auto"),
    ],
)
def test_other_back_ends_and_caches_are_computed_in_full(vllm, lines, tmp_path, monkeypatch, backend, cache, says):
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    monkeypatch.setattr(vllm.connector, "get_layers_from_vllm_config", lambda *_: {"layer.0": layer})
    monkeypatch.setattr(
        "kvfoundry.integrations.vllm.opening.cpu_order",
        lambda *_: pytest.fail("the kernel trusts what it is given"),
    )
    scheduler, worker = both(vllm, groups(vllm, full(vllm)), f"disk:{tmp_path}:1GiB")
    worker.register_kv_caches({"layer.0": cache})
    assert computed_in_full(scheduler, worker) and len(lines) == 1 and says in lines[0]


def test_a_span_that_fits_no_block_is_said(vllm, lines, tmp_path):
    scheduler, worker = both(vllm, groups(vllm, full(vllm)), f"disk:{tmp_path}:1GiB", span=80)
    worker.register_kv_caches({"layer.0": torch.zeros(8, 2, BLOCK, 128)})
    assert computed_in_full(scheduler, worker)
    assert lines == ["serving without the store: span=80 is no multiple of vLLM's block size 32."]


def opening(vllm, monkeypatch, store: str, tmp_path, **settings):
    """Both sides of a small model on the CPU, whose worker has opened its caches."""
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"))
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(vllm.connector, "get_layers_from_vllm_config", lambda *_: {"layer.0": layer})
    monkeypatch.setattr(vllm.connector, "get_tp_group", lambda: alone)
    monkeypatch.setattr(vllm.connector, "get_pp_group", lambda: alone)
    identity = Identity({"format": "test", "namespace": "", "method": "fullkv", "dtype": "float32"})
    monkeypatch.setattr(vllm.connector, "served_identity", lambda *_: identity)
    scheduler, worker = both(vllm, groups(vllm, full(vllm)), store, **settings)
    worker.register_kv_caches({"layer.0": torch.zeros(8, 2, BLOCK, 128)})
    return scheduler, worker


def test_a_store_that_cannot_be_opened_is_said_once(vllm, lines, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    sides = opening(vllm, monkeypatch, f"disk:{tmp_path / 'file'}:1GiB", tmp_path)
    assert computed_in_full(*sides)
    assert len(lines) == 1 and lines[0].startswith("serving without the store: cannot open the store")


def test_a_tier_that_is_away_at_start_costs_one_bounded_wait(vllm, lines, tmp_path, monkeypatch):
    began = time.monotonic()
    sides = opening(vllm, monkeypatch, "redis://127.0.0.1:9/0?timeout=0.5", tmp_path)
    assert time.monotonic() - began < 10
    assert computed_in_full(*sides)
    assert len(lines) == 1 and lines[0].startswith("a tier is away, and requests are computed until it is back: ")


def test_a_copy_for_repair_that_cannot_be_loaded_is_said_and_prefixes_are_served(vllm, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm.connector, "checkpoint_folder", lambda *_: tmp_path / "away")
    repaired = {"documents": "approximate", "repair": "blend(ratio=0.2)"}
    made = config(vllm, f"disk:{tmp_path / 'kv'}:1GiB", **repaired)
    model = SimpleNamespace(quantization=None, model="m", revision=None, hf_config={}, dtype=torch.float32)
    made.model_config, made.load_config = model, SimpleNamespace(download_dir=None)
    monkeypatch.setitem(globals(), "config", lambda *_, **__: made)
    scheduler, worker = opening(vllm, monkeypatch, "", tmp_path)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    assert worker.worker is not None and worker.worker.repairer is None
    assert len(lines) == 1 and lines[0].startswith("documents are not served at other places: a second copy")
    for each in (scheduler, worker):
        each.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_lie_where_the_cpu_s_kernel_puts_them(vllm, dtype, slots, dim):
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from kvfoundry.integrations.vllm.opening import cpu_order

    heads, shape = 3, LayerShape(3, dim, dim)
    cache = torch.zeros(6, heads, slots, 2 * dim, dtype=dtype)
    keys, values = torch.randn(2 * slots, heads, dim).to(dtype), torch.randn(2 * slots, heads, dim).to(dtype)
    where = slot_numbers((4, 1), slots, 0, 2 * slots)
    halves = cache.view(6, heads, 2 * slots, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, where, _get_attn_isa(dtype, slots, dim))
    blocks = OrderedBlocks(cache, shape, cpu_order(shape, cache))
    some = where[5 : slots + 3]
    found = blocks.read(some)
    assert torch.equal(found[0], keys[5 : slots + 3].transpose(0, 1))
    assert torch.equal(found[1], values[5 : slots + 3].transpose(0, 1))
    again = OrderedBlocks(torch.zeros_like(cache), shape, cpu_order(shape, cache))
    again.write(where, keys.transpose(0, 1), values.transpose(0, 1))
    assert torch.equal(again.cache, cache)


def test_numbers_go_through_vllm_s_hooks(vllm):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    connector = vllm.connector.KVFoundryConnector
    one = connector.build_kv_connector_stats({"loads": 2, "hits": {"disk": 3}})
    both_sides = one.aggregate(connector.build_kv_connector_stats({"loads": 1, "hits": {"disk": 1, "redis": 2}}))
    assert both_sides.reduce() == {"loads": 3, "hits.disk": 4, "hits.redis": 2} and not both_sides.is_empty()
    registry = CollectorRegistry()

    def counted(kind):
        return lambda *args, **named: kind(*args, **{**named, "registry": registry})

    types = {kind: counted(kind) for kind in (Counter, Gauge, Histogram)}
    page = connector.build_prom_metrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    page.observe(both_sides.data)
    page.observe({"hits": {"redis": 1}, "recomputed_tokens": 5})
    read = registry.get_sample_value
    assert read("kvfoundry_loads_total", {"engine": "0"}) == 3
    assert read("kvfoundry_hits_total", {"engine": "0", "tier": "redis"}) == 3
    assert read("kvfoundry_recomputed_tokens_total", {"engine": "0"}) == 5
    both_sides.reset()
    assert both_sides.is_empty()


def test_what_memory_of_workers_holds_is_found_by_the_scheduler(vllm, lines, tmp_path):
    """A host tier alone belongs to one server: its workers tell, and take back what turned out to be gone."""
    scheduler, worker = both(vllm, groups(vllm, full(vllm)), "host:1GiB")
    identity = Identity({"format": "test", "namespace": "", "method": "fullkv"})
    card = vllm.connector.Introduction(WorkerCard(identity))
    scheduler.set_xfer_handshake_metadata({0: card})
    asked = request("a", 200)
    names = frozenset(span_key(identity, asked.prompt_token_ids, Span(at, at + 64, at)).id for at in (0, 64))
    assert scheduler.get_num_new_matched_tokens(asked, 0) == (0, False)

    def news(held):
        told = vllm.connector.StepNews(Held()).aggregate(vllm.connector.StepNews(held))
        scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=set(), kv_connector_worker_meta=told))

    news(Held(new=names))
    assert scheduler.get_num_new_matched_tokens(request("b", 200), 0) == (128, True)
    news(Held(gone=names))
    assert scheduler.get_num_new_matched_tokens(request("c", 200), 0) == (0, False)
    # one worker of two without a store: rows of the other alone are of no use
    scheduler.set_xfer_handshake_metadata({0: card, 1: vllm.connector.Introduction(WorkerCard(refusal="no"))})
    news(Held(new=names))
    assert scheduler.get_num_new_matched_tokens(request("d", 200), 0) == (0, False)
    assert scheduler.get_kv_connector_stats().data["lookups"] > 0 and lines == ["serving without the store: no"]
    scheduler.shutdown()
    worker.shutdown()
