"""The scheduler side restores and saves with a real store, step by step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from hetero_connector.artifacts.record import UNNUMBERED, Tier
from hetero_connector.engine.messages import WorkerReport
from hetero_connector.spec import StateType
from tests.engine.fakes import DENSE, HYBRID, FakeRequest, layer, scheduled
from tests.engine.stepped import CHUNK, Engine, artifacts_of, in_use, tokens
from tests.engine.test_media import item

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA


@pytest.fixture
def hybrid() -> Iterator[Engine]:
    engine = Engine(HYBRID)
    yield engine
    engine.side.close()


@pytest.fixture
def dense() -> Iterator[Engine]:
    engine = Engine(DENSE)
    yield engine
    engine.side.close()


def test_a_prompt_is_saved_by_chunks_with_a_checkpoint_at_each(hybrid: Engine) -> None:
    request = FakeRequest("a", tokens(200))
    assert hybrid.admit(request) == 0
    meta = hybrid.step(a=200)
    (save,) = meta.saves
    kinds = [(x.state_type, x.start, x.end) for x in save.copy.artifacts]
    assert kinds == [(kind, i * CHUNK, (i + 1) * CHUNK) for i in range(3) for kind in (KV, SWA)]
    assert save.copy.blocks[KV, 0].ids == hybrid.tables.ids["a"][0][:12]


def test_chunked_prefill_saves_each_chunk_in_the_step_that_completes_it(hybrid: Engine) -> None:
    hybrid.admit(FakeRequest("a", tokens(200)))
    ends = [
        [
            x.end
            for save in hybrid.step(a=n).saves
            for x in save.copy.artifacts
            if x.state_type is KV
        ]
        for n in (50, 50, 100)
    ]
    assert ends == [[], [64], [128, 192]]


def test_the_next_request_restores_up_to_the_last_boundary(hybrid: Engine) -> None:
    hybrid.run(FakeRequest("a", tokens(200)))
    again = FakeRequest("b", tokens(200))
    assert hybrid.admit(again) == 192
    (load,) = hybrid.step(b=8).loads
    assert [(x.state_type, x.end) for x in artifacts_of(load)] == [
        (KV, 64), (KV, 128), (KV, 192), (SWA, 192),
    ]  # fmt: skip
    assert load.blocks[SWA, 1].first_page == 10
    assert load.blocks[SWA, 1].ids == hybrid.tables.ids["b"][1][10:12]


@pytest.mark.parametrize(("num_tokens", "restored"), [(192, 176), (176, 160), (177, 176)])
def test_a_prompt_asked_again_computes_one_block_though_its_chunk_ends_with_it(
    dense: Engine, num_tokens: int, restored: int
) -> None:
    """The last chunk, full or short, is cut before the token that vLLM must compute."""
    dense.run(FakeRequest("a", tokens(num_tokens)))
    dense.recorder.drain()
    assert dense.admit(FakeRequest("b", tokens(num_tokens))) == restored
    (load,) = dense.step(b=num_tokens - restored).loads
    assert [x.end for x in artifacts_of(load)] == [64, 128, num_tokens - num_tokens % 16]
    assert load.blocks[KV, 0].ids == dense.tables.ids["b"][0][: restored // 16]
    assert load.resume_tokens == restored
    counted = dense.counters()
    labels = "{state_type=dense_kv,tier=dram}"
    assert counted[f"heterocache_restored_tokens{labels}"] == restored
    assert counted[f"heterocache_restored_bytes{labels}"] == restored * 16
    assert counted["heterocache_hit_tokens{tier=dram}"] == restored
    request = FakeRequest("c", tokens(num_tokens))
    assert dense.admit(request, local=restored) == 0, "the engine has as much itself"


@pytest.mark.parametrize(("num_tokens", "last_end"), [(170, 160), (250, 192)])
def test_a_prompt_asked_again_is_restored_whole_though_its_chunk_has_tokens_of_the_answer(
    dense: Engine, num_tokens: int, last_end: int
) -> None:
    dense.run(FakeRequest("a", tokens(num_tokens), num_prompt_tokens=150))
    dense.recorder.drain()
    assert dense.admit(FakeRequest("b", tokens(150))) == 144
    (load,) = dense.step(b=6).loads
    assert [x.end for x in artifacts_of(load)] == [64, 128, last_end]
    assert load.blocks[KV, 0].ids == dense.tables.ids["b"][0][:9]
    assert load.resume_tokens == 144
    counted = dense.counters()
    labels = "{state_type=dense_kv,tier=dram}"
    assert counted[f"heterocache_restored_tokens{labels}"] == 144
    assert counted[f"heterocache_restored_bytes{labels}"] == 144 * 16
    other = FakeRequest("c", [*tokens(143), *tokens(7, seed=9)])
    assert dense.admit(other) == 128, "it differs before the last cut"
    assert dense.admit(FakeRequest("d", tokens(150)), local=144) == 0
    assert dense.admit(FakeRequest("e", tokens(150)), local=128) == 16


def test_the_newest_answer_to_a_prompt_that_is_stored_counts(dense: Engine) -> None:
    """An answer for which there is no space does not hide an earlier one."""
    dense.run(FakeRequest("a", tokens(170), num_prompt_tokens=150))
    other = FakeRequest("b", [*tokens(150), *tokens(40, seed=9)], num_prompt_tokens=150)
    with patch.object(dense.store, "begin_save", return_value=None):
        dense.run(other)
    assert dense.admit(FakeRequest("c", tokens(150))) == 144


def test_an_answered_prompt_is_found_only_after_the_chunks_before_it(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(170), num_prompt_tokens=150))
    request = FakeRequest("b", tokens(150))
    with patch.object(dense.store, "holdings", return_value=[]):
        assert dense.admit(request) == 0


def test_boundary_state_ends_where_its_chunk_does(hybrid: Engine) -> None:
    hybrid.run(FakeRequest("a", tokens(192)))
    assert hybrid.admit(FakeRequest("b", tokens(192))) == 128


def test_the_end_of_a_request_is_a_boundary_of_its_own(hybrid: Engine) -> None:
    hybrid.run(FakeRequest("a", tokens(110)))
    turn = FakeRequest("b", [*tokens(110), *tokens(50, seed=9)])
    assert hybrid.admit(turn) == 96


def test_decoded_tokens_are_saved_as_they_fill_a_chunk(dense: Engine) -> None:
    request = FakeRequest("a", tokens(60), num_prompt_tokens=60)
    dense.admit(request)
    dense.step(a=60)
    saves = []
    for token in range(10):
        request.all_token_ids.append(token)
        dense.grow_table(request)
        saves += dense.step(a=1).saves
    assert [x.end for save in saves for x in save.copy.artifacts] == [64]


def test_a_chunk_waits_until_its_last_token_is_known(dense: Engine) -> None:
    """Async scheduling computes a token before the scheduler learns its id."""
    request = FakeRequest("a", tokens(63))
    dense.admit(request)
    assert dense.step(a=64).saves == []
    request.all_token_ids.append(5)
    dense.grow_table(request)
    assert len(dense.step(a=1).saves) == 1


def test_a_recycled_window_is_not_saved_but_the_chunk_is(hybrid: Engine) -> None:
    request = FakeRequest("a", tokens(64))
    hybrid.admit(request)
    hybrid.tables.ids["a"][1][2] = 0
    (save,) = hybrid.step(a=64).saves
    assert [x.state_type for x in save.copy.artifacts] == [KV]


def test_pages_of_the_local_hit_are_never_loaded_over(hybrid: Engine) -> None:
    hybrid.run(FakeRequest("a", tokens(200)))
    request = FakeRequest("b", tokens(200))
    assert hybrid.admit(request, local=80) == 112
    (load,) = hybrid.step(b=8).loads
    assert load.blocks[KV, 0].first_page == 5
    assert [x.start for x in artifacts_of(load) if x.state_type is KV] == [64, 128]


def test_nothing_is_saved_twice(hybrid: Engine) -> None:
    hybrid.run(FakeRequest("a", tokens(200)))
    hybrid.admit(FakeRequest("b", tokens(200)))
    assert hybrid.step(b=8).saves == []


def test_an_engine_that_only_waits_for_reports_pauses(
    dense: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA a report comes when the copies have ended; vLLM steps without a pause until then."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    dense.admit(FakeRequest("a", tokens(64)))
    meta = dense.order(a=64)
    assert not pauses, "the step computes"
    dense.order()
    assert len(pauses) == 1
    dense.report(meta)
    dense.order()
    assert len(pauses) == 1, "nothing is awaited"


def test_a_load_that_takes_longer_than_a_decode_step_parks_its_request() -> None:
    """Other requests go on meanwhile, as on CUDA."""
    engine = Engine(DENSE, parking="long")
    engine.run(FakeRequest("a", tokens(200)))
    for _ in range(9):
        engine.costs.load.observe(Tier.DRAM, {KV: 4096.0}, seconds=5.0)
        engine.costs.load.observe(Tier.DRAM, {KV: 3 * 4096.0}, seconds=15.0)

    def answer(name: str) -> tuple[int | None, bool]:
        request: Any = FakeRequest(name, tokens(200))
        answered = engine.side.match(request, 0)
        engine.side.on_finished(request, ([], []))
        return answered

    assert answer("b") == (192, False), "no one else waits for it"
    other = FakeRequest("o", tokens(70, seed=3))
    engine.admit(other)
    engine.step(o=70)
    assert answer("c") == (192, True)
    engine.finish(other)
    engine.step()
    assert answer("d") == (192, False)
    engine.side.close()


def test_a_model_whose_layers_call_no_hooks_parks_loads_that_its_forward_cannot_hide() -> None:
    engine = Engine(replace(DENSE, layers=tuple(layer(x, 0) for x in "abcd")), parking="long")
    engine.run(FakeRequest("a", tokens(200)))
    engine.admit(FakeRequest("o", tokens(70, seed=3)))
    engine.step(o=70)
    for _ in range(9):
        engine.costs.load.observe(Tier.DRAM, {KV: 4 * 4096.0}, seconds=0.2)
        engine.costs.load.observe(Tier.DRAM, {KV: 12 * 4096.0}, seconds=0.6)
        engine.costs.compute.observe_work(1, 0.0, 0.2)
        engine.costs.compute.observe_work(200, 0.0, 1.2)

    def answer(name: str) -> tuple[int | None, bool]:
        return engine.side.match(cast("Any", FakeRequest(name, tokens(400)[:400])), 0)

    assert answer("b") == (192, False)
    engine.side.on_report(WorkerReport(hidden_share=0.0))
    assert answer("c") == (192, True)
    engine.side.on_report(WorkerReport())
    assert answer("d") == (192, True), "as before"
    engine.side.on_report(WorkerReport(hidden_share=1.0))
    assert answer("e") == (192, False)
    engine.side.close()


def test_two_requests_at_once_save_a_shared_chunk_once(dense: Engine) -> None:
    for name in "ab":
        dense.admit(FakeRequest(name, tokens(64)))
    meta = dense.step(a=64, b=64)
    assert sum(len(save.copy.artifacts) for save in meta.saves) == 1


def test_loaded_artifacts_are_pinned_until_the_load_is_reported(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(200)))
    dense.admit(FakeRequest("b", tokens(200)))
    meta = dense.side.order_step(scheduled(b=8))  # type: ignore[arg-type]
    assert len(in_use(dense)) == 3
    dense.report(meta)
    assert not in_use(dense)


def test_a_request_that_is_never_admitted_keeps_no_pins(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(200)))
    request = FakeRequest("b", tokens(200))
    assert dense.side.match(request, 0) == (192, False)  # type: ignore[arg-type]
    assert in_use(dense)
    dense.side.on_finished(request, ([], []))  # type: ignore[arg-type]
    assert not in_use(dense)


def test_a_local_hit_that_grows_while_waiting_is_not_loaded_over(hybrid: Engine) -> None:
    hybrid.run(FakeRequest("a", tokens(200)))
    request = FakeRequest("b", tokens(200))
    assert hybrid.side.match(request, 0)[0] == 192  # type: ignore[arg-type]
    assert hybrid.admit(request, local=80) == 112
    (load,) = hybrid.step(b=8).loads
    assert load.blocks[KV, 0].first_page == 5


def test_chunks_that_a_growing_local_hit_overtakes_are_not_counted(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(200)))
    request = FakeRequest("b", tokens(200))
    assert dense.side.match(request, 0)[0] == 192  # type: ignore[arg-type]
    pending = dense.side._trackers["b"].restore
    assert pending is not None
    first, *rest = pending.plan.chunks
    slow = replace(first, tiers=dict.fromkeys(first.tiers, Tier.SSD), number=UNNUMBERED)
    pending.plan = replace(pending.plan, chunks=[slow, *rest])
    dense.counters()
    assert dense.admit(request, local=80) == 112
    dense.step(b=8)
    counted = dense.counters()
    assert counted["heterocache_hit_tokens{tier=dram}"] == 112
    assert not [name for name, value in counted.items() if "ssd" in name or value < 0]


def test_a_local_hit_that_overtakes_the_plan_drops_it(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(200)))
    request = FakeRequest("b", tokens(200))
    assert dense.side.match(request, 0)[0] == 192  # type: ignore[arg-type]
    assert dense.side.match(request, 192)[0] == 0  # type: ignore[arg-type]
    assert not in_use(dense)


def test_a_request_that_ends_while_another_connector_loads_it_is_not_saved(dense: Engine) -> None:
    """In a MultiConnector vLLM counts the tokens of the other's load, which has not ended."""
    request = FakeRequest("a", tokens(130))
    dense.admit(request)
    request.num_computed_tokens = 129
    dense.step()
    dense.finish(request)
    dense.step()
    assert dense.ask(FakeRequest("b", tokens(130))) == 0


def test_a_request_that_another_connector_loads_is_counted_once(dense: Engine) -> None:
    """In a MultiConnector it is admitted a second time when the other's load has ended."""
    request = FakeRequest("a", tokens(200))
    dense.admit(request)
    request.num_computed_tokens = 192
    dense.order()
    dense.side.on_allocated(request, 0)  # type: ignore[arg-type]
    dense.step(a=8)
    assert dense.side._counter.sources.tokens()["computed"] == 200


def test_a_parked_request_is_counted_once() -> None:
    engine = Engine(DENSE, parking="always")
    engine.run(FakeRequest("a", tokens(200)))
    counted = engine.side._counter.sources.tokens()
    request = FakeRequest("b", tokens(200))
    assert engine.admit(request) == 192
    engine.step()
    engine.side.on_allocated(request, 0)  # type: ignore[arg-type]
    engine.step(b=8)
    assert engine.side._counter.sources.tokens() == counted | {"dram": 192, "computed": 208}
    engine.side.close()


def test_a_request_that_runs_again_in_the_step_of_its_preemption_decodes(dense: Engine) -> None:
    """A reset of vLLM's prefix cache preempts between steps, and the next one admits again."""
    request = FakeRequest("a", tokens(200))
    dense.admit(request)
    dense.step(a=200)
    request.all_token_ids.append(5)
    request.num_computed_tokens = 0
    dense.admit(request)
    computed = request.num_computed_tokens
    output = scheduled(a=201 - computed)
    output.preempted_req_ids = {"a"}
    dense.report(dense.side.order_step(output))  # type: ignore[arg-type]
    request.num_computed_tokens = 201
    dense.ask(new := FakeRequest("b", tokens(50, seed=9)))
    load = dense.side._engine_load(dense.side._trackers[new.request_id], [])
    assert (load.queued_tokens, load.running_decodes, load.waiting_tokens) == (0, 1, 0)


def test_nothing_is_sealed_that_may_rest_on_pages_that_were_not_loaded(dense: Engine) -> None:
    """Another request may share them, also one that ends at once, or in a step under way."""
    ended, running = FakeRequest("a", tokens(130)), FakeRequest("b", tokens(130, seed=1))
    for request in (ended, running):
        dense.admit(request)
    meta = dense.order(a=130, b=70)
    dense.finish(ended)
    dense.side.on_invalid_blocks()
    dense.report(meta)
    dense.step(b=60)
    dense.finish(running)
    dense.step()
    assert not dense.side.has_work
    assert dense.ask(FakeRequest("c", tokens(131))) == 0
    assert dense.ask(FakeRequest("d", tokens(131, seed=1))) == 0
    later = FakeRequest("e", tokens(130))
    dense.run(later)
    assert dense.ask(FakeRequest("f", tokens(131))) == 128


def test_other_salt_and_other_tokens_do_not_match(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(200)))
    assert dense.admit(FakeRequest("b", tokens(200, seed=1))) == 0


def test_pooling_and_streaming_requests_are_left_alone(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(200)))
    for odd in (
        FakeRequest("b", tokens(200), pooling_params=SimpleNamespace()),
        FakeRequest("c", tokens(200), resumable=True),
        FakeRequest("d", tokens(200), skip_reading_prefix_cache=True),
    ):
        assert dense.side.match(odd, 0) == (0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize("closed", [False, True], ids=["a failed load", "closed"])
def test_no_request_waits_for_digests_once_the_cache_has_stopped(
    dense: Engine, closed: bool
) -> None:
    ended = threading.Event()
    dense.side.identifier.embeddings_thread.submit(lambda: ended.wait(60.0))
    request = FakeRequest("a", tokens(200), prompt_embeds=torch.zeros(200, 4))
    assert dense.ask(request) is None
    if closed:
        dense.side.close()
    else:
        dense.side.on_report(WorkerReport(broken=True))
    assert dense.ask(request) == 0
    ended.set()


def test_an_adapter_that_cannot_be_identified_is_served_but_not_cached(dense: Engine) -> None:
    dense.run(FakeRequest("a", tokens(200)))
    lora = LoRARequest("gone", 1, "/nowhere/adapter")
    request = FakeRequest("b", tokens(200), lora_request=lora)
    assert dense.admit(request) == 0
    assert dense.step(b=200).saves == []
    dense.finish(request)
    assert dense.step().early_saves == []


def test_an_adapter_whose_files_change_is_not_cached_any_more(
    dense: Engine, tmp_path: Path
) -> None:
    """vLLM may have loaded either content under that id."""
    weights = tmp_path / "adapter_model.safetensors"
    lora = LoRARequest("late", 1, str(tmp_path))

    def restored(name: str) -> int:
        return dense.run(FakeRequest(name, tokens(200), lora_request=lora))

    assert restored("a") == 0  # it is still being fetched
    weights.write_bytes(b"first")
    assert [restored("b"), restored("c")] == [0, 192]
    weights.write_bytes(b"another")
    assert restored("d") == 0
    weights.write_bytes(b"first")
    assert restored("e") == 0


def test_an_engine_without_saves_reports_that_the_io_thread_hangs(dense: Engine) -> None:
    """The store publishes its health by that very thread."""
    dense.step()
    dense.side._recorder.drain()
    assert not dense.side._has_news()
    catalog = dense.side.store.catalog
    catalog.step_began_s = catalog.clock() - catalog.config.load_deadline_s
    assert dense.side._has_news()
    assert dense.side._recorder.gauge("heterocache_io_alive") == 0


def test_adapter_requests_under_way_are_not_stored_once_its_weights_were_replaced(
    dense: Engine, tmp_path: Path
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    lora = LoRARequest("x", 1, str(tmp_path))
    assert dense.run(FakeRequest("a", tokens(200), lora_request=lora)) == 0
    running = FakeRequest("b", tokens(400), lora_request=lora)
    waiting = FakeRequest("c", tokens(200), lora_request=lora)
    assert dense.admit(running) == 192
    assert dense.answered(waiting) == 192
    replaced = LoRARequest("x", 1, str(tmp_path / "other"), load_inplace=True)
    dense.side.identifier.on_adapter_loaded(replaced, b"other")
    assert dense.step(b=208).saves == []
    dense.finish(running)
    assert dense.step().early_saves == []
    assert dense.answered(waiting) == 0
    assert dense.run(FakeRequest("d", tokens(200))) == 0
    assert dense.run(FakeRequest("e", tokens(200))) == 192, "the model itself is not concerned"


def test_early_saves_whose_pages_are_overwritten_are_abandoned(dense: Engine) -> None:
    request = FakeRequest("a", tokens(110))
    dense.admit(request)
    dense.step(a=110)
    dense.finish(request)
    output = scheduled()
    output.new_block_ids_to_zero = [dense.tables.ids["a"][0][5]]
    assert dense.side.has_work
    meta = dense.side.order_step(output)  # type: ignore[arg-type]
    assert meta.early_saves == []
    assert not dense.side.has_work
    assert dense.counters()["heterocache_saves_abandoned{cause=overwritten}"] == 1
    assert dense.admit(FakeRequest("b", tokens(150))) == 64


def test_reset_forgets_everything_and_running_requests_save_once_computed_anew(
    dense: Engine,
) -> None:
    request = FakeRequest("a", tokens(130))
    dense.admit(request)
    dense.step(a=130)
    dense.side.reset()
    assert dense.side.match(FakeRequest("b", tokens(130)), 0)[0] == 0  # type: ignore[arg-type]
    request.all_token_ids.append(1)
    dense.grow_table(request)
    assert dense.step(a=1).saves == []
    request.num_computed_tokens = 0  # preempted
    assert dense.admit(request) == 0
    (save,) = dense.step(a=131).saves
    assert [x.end for x in save.copy.artifacts] == [64, 128]


def test_an_evicted_parent_is_saved_again_before_its_child() -> None:
    engine = Engine(DENSE, dram_bytes=4 * 4096)
    request = FakeRequest("a", tokens(64))
    engine.admit(request)
    engine.step(a=64)
    engine.store.reset()
    request.all_token_ids += tokens(64, seed=3)
    engine.grow_table(request)
    (save,) = engine.step(a=64).saves
    assert [x.end for x in save.copy.artifacts] == [64, 128]
    engine.side.close()


def test_a_full_tier_of_pinned_artifacts_saves_nothing_and_goes_on() -> None:
    engine = Engine(DENSE, dram_bytes=2 * 4096)
    engine.run(FakeRequest("a", tokens(128)))
    parked = FakeRequest("b", [*tokens(128), 1])
    assert engine.admit(parked) == 128
    other = FakeRequest("c", tokens(128, seed=5))
    engine.admit(other)
    meta = engine.side.order_step(scheduled(b=1, c=128))  # type: ignore[arg-type]
    assert meta.saves == []
    engine.report(meta)
    engine.side.close()


def test_a_running_request_stops_saving_when_its_images_name_is_distrusted(
    dense: Engine,
) -> None:
    """vLLM may use the other item's embeddings from then on."""

    def named(request_id: str, pixel: float) -> FakeRequest:
        data = item(pixels=torch.full((4,), pixel))
        feature = MultiModalFeatureSpec(data, "image", "cat", PlaceholderRange(3, 20))
        return FakeRequest(request_id, tokens(400), mm_features=[feature])

    running = named("a", 1.0)
    dense.admit(running)
    assert dense.step(a=128).saves
    running.num_computed_tokens = 128
    assert dense.admit(named("b", 2.0)) == 0
    assert dense.step(a=128, b=200).saves == []
    dense.finish(running)
    assert dense.step().early_saves == []
