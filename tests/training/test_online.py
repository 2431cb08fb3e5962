"""Heads that learn while they are used: what is heard, what is learned, what is kept, and what can go wrong."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import ANY, MagicMock, Mock, call

import pytest
import torch
from helpers.capturing import captures  # noqa: F401  (a fixture)
from training.tiny import make_target
from transformers import DynamicCache

from hf_clover import CloverHeads, Eagle3Heads, OnlineLearner, TextMemory, load_heads, pack_for_cpu
from hf_clover.hub.push import LEARNER, files_to_push
from hf_clover.targets.private_api import cache_name
from hf_clover.training import first_fit, online
from hf_clover.training.first_fit import FirstFit
from hf_clover.training.lessons import LONGEST, Document, Lessons
from hf_clover.training.pace import PERIOD, Pace
from hf_clover.training.teacher import Teacher

PROMPT = torch.arange(5, 17)[None]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "TOKENS", 40)
    monkeypatch.setattr(online, "LEAST", 10)
    monkeypatch.setattr(online, "WINDOW", 16)
    monkeypatch.setattr(first_fit, "FIRST", 20)
    monkeypatch.setattr(first_fit, "LAST", 40)


@pytest.fixture
def target():
    return make_target()


def learner_of(target, heads=None, **options) -> OnlineLearner:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = CloverHeads.from_target(target, num_heads=2) if heads is None else heads
    return OnlineLearner(heads, target, **{"share": 1.0, **options})


@pytest.fixture
def learner(target) -> OnlineLearner:
    return learner_of(target)


def write(target, learner, prompt=PROMPT, **options):
    options = {"max_new_tokens": 30, "eos_token_id": None, "num_assistant_tokens": 6, **options}
    return target.generate(prompt, assistant_model=learner.heads, **options)


def learned(target, times=1, **options) -> OnlineLearner:
    """A learner that was open while so many texts were written."""
    with learner_of(target, **options) as learner:
        for _ in range(times):
            write(target, learner)
    return learner


def plain_of(target) -> torch.Tensor:
    return target.generate(PROMPT, max_new_tokens=30, eos_token_id=None)


def weights_of(model) -> torch.Tensor:
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


# ---------------------------------------------------------------------- the first weights


def test_the_first_fit_finds_a_linear_map_between_states(target, monkeypatch):
    """States of which each is a linear function of the last one and of the token between."""
    heads = CloverHeads.from_target(target)
    heads.scaled_states = lambda states: states.float()
    size, generator = heads.config.hidden_size, torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator))[0]
    bias = torch.randn(size, generator=generator)
    tokens = torch.randint(target.config.vocab_size, (2000,), generator=generator)
    states = [torch.zeros(size)]
    for token in tokens[:-1]:
        states.append(0.5 * states[-1] @ turn.T + heads.embed(token) + bias)
    fit = FirstFit.of(heads)
    fit.add([Document(torch.stack(states), tokens)])
    monkeypatch.setattr(first_fit, "DAMPING", 1e-3)
    assert fit.fit()
    weight, found_bias = heads.entry_decoder.fc.weight, heads.entry_decoder.fc.bias
    torch.testing.assert_close(weight, torch.cat((0.5 * turn, torch.eye(size)), dim=1), atol=0.02, rtol=0)
    torch.testing.assert_close(found_bias, bias, atol=0.1, rtol=0)
    assert not fit.fit()  # without new tokens
    assert fit.has_fitted
    assert FirstFit.of(Eagle3Heads.from_target(target)) is None


def test_new_heads_are_fitted_at_first_and_then_trained_whole(target, learner):
    layers = [each.entry_decoder.fc.weight for each in (learner.heads, learner.student)]
    before = layers[0].clone()
    with learner:
        assert learner.first_fit is not None
        write(target, learner)  # 42 tokens: the fit is over after them
        fitted = layers[0].clone()
        assert not torch.equal(fitted, before)
        assert torch.equal(*layers)
        assert learner.first_fit is None
        steps = learner.steps
        write(target, learner)
        assert learner.steps > steps
        assert not torch.equal(layers[1], fitted)
    assert learner_of(target, learner.heads).first_fit is None  # they are trained now


# ---------------------------------------------------------------------- what is heard


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("kind", ["clover-x", "eagle-3"])
def test_recorded_states_of_a_batch_equal_those_of_one_forward_per_text(target, kind, in_graphs, request):
    stand_in = request.getfixturevalue("captures") if in_graphs else None
    made = CloverHeads.from_target(target, num_heads=2) if kind == "clover-x" else Eagle3Heads.from_target(target)
    learner = learner_of(target, made)
    prompt = torch.stack((PROMPT[0], torch.cat((torch.zeros(5, dtype=torch.long), PROMPT[0, :7]))))
    mask = (prompt != 0).long()
    heard = []
    with learner:
        learner.lessons.add = heard.extend
        texts = write(target, learner, prompt, attention_mask=mask)
    teacher = Teacher(target, made)
    assert stand_in is None or stand_in.replayed > 5
    assert len(heard) == 2
    for row, document in enumerate(heard):
        ids = texts[row][mask[row].argmax() :][None]
        states = teacher.hidden_states({"input_ids": ids})[0]
        assert torch.equal(document.next_tokens, ids[0, 1:])
        assert torch.allclose(document.states.float(), states[:-1], rtol=2e-2, atol=2e-2)


def test_a_conversation_is_one_document_of_which_the_first_turn_is_known(target, learner):
    heard, cache = [], DynamicCache(config=target.config)
    with learner:
        learner.lessons.add = heard.extend
        first = write(target, learner, **{cache_name(): cache})
        second = write(target, learner, torch.cat((first, PROMPT[:, :5]), dim=1), **{cache_name(): cache})
    assert heard[0].known == 0
    assert heard[1].known == len(heard[0])
    assert torch.equal(heard[1].next_tokens, second[0, 1:])


def test_rows_that_leave_the_batch_are_recorded_to_their_end(target, learner):
    heard, prompt = [], torch.cat([PROMPT + row for row in range(5)])
    ending = int(target.generate(PROMPT, max_new_tokens=8, eos_token_id=None)[0, -4])
    with learner:
        learner.lessons.add = heard.extend
        texts = write(target, learner, prompt, eos_token_id=ending, pad_token_id=0, max_new_tokens=60)
    lengths = [len(document) + 1 for document in heard]
    assert min(lengths) < max(lengths)
    for text, document in zip(texts, heard, strict=True):
        assert torch.equal(document.next_tokens, text[1 : len(document) + 1])


def test_an_open_learner_lets_heads_copy_from_earlier_texts(target, learner):
    learner.heads.config.draft_copies = 8
    with learner:
        accepted = []
        for _ in range(2):
            out = write(target, learner, return_dict_in_generate=True, num_assistant_tokens=8)
            accepted.append(out.speculation.accepted_tokens)
        assert len(learner.heads.text_memory) == PROMPT.shape[1] + 30
        assert accepted[1] > accepted[0] + 5
    assert learner.heads.text_memory is None
    learner.heads.text_memory = own = TextMemory(10)
    with learner:
        assert learner.heads.text_memory is own
    assert learner.heads.text_memory is own


@pytest.mark.parametrize("do_sample", [False, True])
def test_tokens_equal_plain_while_drafts_get_better(target, learner, do_sample):
    heard, accepted = [], []
    options = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": do_sample}
    torch.manual_seed(0)
    plain = target.generate(PROMPT, **options)
    with learner:
        learner.lessons.add = heard.extend
        for _ in range(2):
            torch.manual_seed(0)
            ours = write(target, learner, return_dict_in_generate=True, **options)
            assert torch.equal(ours.sequences, plain)
            accepted.append(ours.speculation.accepted_tokens)
            for _ in range(40):
                learner._learn(heard[:1], [])
    assert accepted[1] > accepted[0] + 5


def test_a_packed_target_can_be_learned_from(monkeypatch):
    monkeypatch.setattr("hf_clover.network.packing.LEAST_WEIGHTS", 1)
    target = make_target()
    made = CloverHeads.from_target(target, num_heads=2, draft_vocab_size=32)
    assert pack_for_cpu(target) > 0
    before = weights_of(made)
    learner = learned(target, heads=made)
    assert learner.steps == 1
    assert not torch.equal(weights_of(made), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_learning_works_under_the_callers_autocast(target, learner, dtype):
    with learner, torch.autocast("cpu", dtype):
        plain = plain_of(target)
        for _ in range(3):
            assert torch.equal(write(target, learner), plain)
    assert learner.steps >= 2
    assert torch.isfinite(weights_of(learner.heads)).all()
    assert all(weight.dtype == torch.float32 for weight in learner.heads.parameters())


def test_learning_works_in_inference_mode(target, learner):
    with torch.inference_mode(), learner:
        write(target, learner)
    assert learner.steps == 1


# ---------------------------------------------------------------------- when it learns


def test_learning_takes_no_more_than_its_share(target, monkeypatch):
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(online, "clock", clock)
    learner = learner_of(target, share=0.25)
    monkeypatch.setattr(learner, "_learn", lambda *_: clock.configure_mock(return_value=clock() + 1.0))
    with learner:
        for _ in range(16):
            clock.return_value += 0.9
            write(target, learner)
        assert 0.15 * clock() < learner._spent <= 0.25 * clock() + 1


def test_idle_time_is_used_for_learning_without_a_limit(target):
    learner = learner_of(target, share=0.0)
    with learner:
        for _ in range(3):
            write(target, learner)
        assert learner.steps == 0
        with learner.idle():
            for _ in range(1000):
                if learner.lessons.waiting < online.TOKENS:
                    break
                time.sleep(0.01)
        assert learner.steps > 0


def test_two_threads_may_share_a_learner(target, learner):
    plain = plain_of(target)
    with learner, ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda _: [write(target, learner) for _ in range(5)], range(2)))
    assert all(torch.equal(text, plain) for of in texts for text in of)
    assert learner.steps > 0


def test_rates_fall_then_learning_rests_until_a_new_kind_of_text_comes():
    pace, rates = Pace(), []
    while not pace.is_resting:
        pace.note(2.0)
        rates.append(pace.rate)
    assert rates[0] < rates[9] == 1.0
    assert sorted(rates[10:], reverse=True) == rates[10:]
    assert len(rates) == 6 * PERIOD
    assert [pace.looks() for _ in range(20)].count(True) == 2
    for _ in range(20):
        assert not pace.note(2.0)
    assert any(pace.note(3.0) for _ in range(8))
    assert not pace.is_resting
    assert pace.rate_then == 1.0


@pytest.mark.parametrize("variant", ["clover-x", "clover", "medusa"])
def test_heads_that_were_trained_in_this_process_learn_more_slowly_than_new_ones(target, variant):
    heads = CloverHeads.from_target(target, variant)
    assert OnlineLearner(heads, target).pace.rate_then == 1
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(0.01)  # as training does
    assert OnlineLearner(heads, target).pace.rate_then == online.RATE_OF_TRAINED


def test_a_resting_learner_changes_no_weight(target, learner):
    learner.pace.is_resting = True
    before = weights_of(learner.heads)
    with learner:
        write(target, learner)
    assert learner.steps == 0
    assert torch.equal(weights_of(learner.heads), before)


def test_old_texts_are_kept_at_random_within_the_memory_limit():
    lessons = Lessons(most_bytes=100 * (8 * 4 + 4 * 8), most_new=8)
    for number in range(1000):
        lessons.add([Document(torch.zeros(4, 4, dtype=torch.bfloat16), torch.full((4,), number))])
        lessons.take(4)
    assert lessons.nbytes == sum(document.nbytes for document in lessons.old) <= lessons.most_bytes
    kept = [int(document.next_tokens[0]) for document in lessons.old]
    assert len(kept) == 100
    assert 350 < sum(kept) / len(kept) < 650
    lessons.forget()
    assert (lessons.nbytes, lessons.old) == (0, [])


def test_a_step_is_filled_up_with_old_text():
    lessons = Lessons(most_bytes=1 << 20, most_new=1000)
    lessons.add([Document(torch.zeros(400, 4, dtype=torch.bfloat16), torch.arange(400)) for _ in range(2)])
    new, old = lessons.take(400)
    assert ([len(each) for each in new], old) == ([400], [])
    new, old = lessons.take(400)
    assert ([len(each) for each in new], [len(each) for each in old]) == ([400], [100])
    lessons.add([Document(torch.zeros(100, 4, dtype=torch.bfloat16), torch.arange(100))])
    new, old = lessons.take(400)
    assert ([len(each) for each in new], [len(each) for each in old]) == ([100], [100] * 3)


def test_a_long_text_is_learned_in_pieces():
    document = Document(torch.zeros(2 * LONGEST + 100, 4), torch.arange(2 * LONGEST + 100), known=50)
    pieces = document.pieces()
    assert [len(piece) for piece in pieces] == [LONGEST, LONGEST, 50]
    assert sum(piece.new for piece in pieces) == document.new


# ---------------------------------------------------------------------- what it keeps


def test_the_next_process_goes_on_where_this_one_stopped(target, tmp_path):
    first = learned(target, 4, folder=tmp_path)
    second = OnlineLearner(None, target, folder=tmp_path, share=1.0)
    assert (second.steps, second.tokens) == (first.steps, first.tokens)
    assert first.steps > 2
    assert torch.equal(weights_of(second.heads), weights_of(first.heads))
    assert torch.equal(weights_of(second.student), weights_of(first.student))
    saved = weights_of(first.heads)
    assert f"| tokens | {first.tokens:,} |" in (tmp_path / "README.md").read_text()
    documents = [Document(torch.randn(50, 32).bfloat16(), torch.arange(50) % 48)]
    for learner in (first, second):
        learner._learn(documents, [])
    assert torch.equal(weights_of(second.heads), weights_of(first.heads))  # the optimizer's state went on, too
    assert torch.equal(weights_of(load_heads(tmp_path, target)), saved)


def test_a_kill_in_the_middle_of_a_save_loses_nothing_older(target, tmp_path, monkeypatch):
    learner = learned(target, folder=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    learner._learn([Document(torch.randn(50, 32).bfloat16(), torch.arange(50) % 48)], [])
    for place, name in enumerate(("save_pretrained", "replace", "save_file", "write_card")):
        with monkeypatch.context() as patch:
            owner = {"save_pretrained": learner.heads, "replace": Path}.get(name, online)
            patch.setattr(owner, name, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                learner.save()
        again = OnlineLearner(None, target, folder=tmp_path)
        assert again.steps == learner.steps - (place < 3)
        if place == 0:
            assert {p: p.read_bytes() for p in before} == before
    learner.save()
    assert not (tmp_path / ".saving").exists()
    assert OnlineLearner(None, target, folder=tmp_path).steps == learner.steps


def test_the_learners_state_is_not_pushed(target, tmp_path):
    learned(target, folder=tmp_path)
    pushed = files_to_push(tmp_path, "org/clover-heads")
    assert (tmp_path / LEARNER).exists()
    assert LEARNER not in pushed
    assert {"model.safetensors", "config.json", "README.md"} <= pushed.keys()


def test_emitted_ids_replace_unused_ids_of_the_draft_vocabulary(target):
    made = CloverHeads.from_target(target, num_heads=2, draft_vocab_size=32)
    with learner_of(target, made) as learner:
        for _ in range(4):
            text = write(target, learner)
    emitted = {int(token) for token in text[0, 1:-1] if int(token) >= 32}
    assert emitted
    assert learner.exchange_ids() == 0  # leaving the block has done it
    assert emitted <= set(learner.heads.draft_ids.tolist())
    assert torch.equal(learner.heads.draft_ids, learner.student.draft_ids)
    ours = target.generate(PROMPT, assistant_model=learner.heads, max_new_tokens=30, eos_token_id=None)
    assert torch.equal(ours, plain_of(target))


def test_new_heads_are_made_without_using_the_callers_random_numbers(target):
    state = torch.get_rng_state()
    learner = OnlineLearner(None, target)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(learner.heads, CloverHeads)


def test_the_record_has_an_entry_for_each_call(target):
    learner = learned(target, 3)
    assert len(learner.record) == 3
    assert str(learner).endswith(f"when we began), {learner.tokens:,} tokens learned from")
    assert [entry["tokens"] for entry in learner.record] == sorted(entry["tokens"] for entry in learner.record)


# ---------------------------------------------------------------------- what can go wrong


def test_a_step_that_gives_nan_is_dropped(target, learner, monkeypatch, caplog):
    learner.first_fit = None
    monkeypatch.setattr(online, "weighted_loss", lambda sums, *_: sums.sum() * float("nan"))
    before = weights_of(learner.heads)
    with learner:
        write(target, learner)
    assert learner.steps == 0
    assert "gave NaN and was dropped" in caplog.text
    assert torch.equal(weights_of(learner.heads), before)
    assert torch.equal(weights_of(learner.student), before)


def test_on_a_device_with_streams_a_step_has_one_of_its_own(target, learner, monkeypatch):
    """Stand-ins for streams: a step begins after the kernels of `generate`, and its own are done when it returns."""
    device = target.device
    learner.first_fit = None
    streams = MagicMock()
    streams.learn.side_effect = learner._learn
    monkeypatch.setitem(online.STREAMS, "cpu", streams)
    monkeypatch.setattr(learner, "_learn", lambda *texts: streams.learn(*texts))
    with learner:
        write(target, learner)
        learner.step(least=1)
    assert learner.steps > 0
    own, of_generate = streams.Stream.return_value, streams.current_stream.return_value
    begin = [call.Stream(device), call.current_stream(device), call.Stream().wait_stream(of_generate)]
    begin += [call.stream(own), call.stream().__enter__()]
    end = [call.stream().__exit__(None, None, None), call.Stream().synchronize()]
    assert streams.mock_calls == [*begin, call.learn(ANY, ANY), *end] * learner.steps


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("no memory"), "Learning is off: the device has no memory left"),
        (RuntimeError("something odd"), "Learning is off: a step failed (something odd)"),
    ],
)
def test_after_a_step_that_fails_learning_is_off_and_generate_goes_on(
    target, learner, monkeypatch, caplog, error, said
):
    plain = plain_of(target)
    monkeypatch.setattr(learner, "_learn", Mock(side_effect=error))
    with learner:
        for _ in range(2):
            assert torch.equal(write(target, learner), plain)
    assert caplog.text.count(said) == 1


def test_a_full_disk_is_logged_and_generate_goes_on(target, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(online, "STEPS_BETWEEN_SAVES", 1)
    learner = learner_of(target, folder=tmp_path)
    with learner:
        with monkeypatch.context() as patch:
            patch.setattr(learner, "save", Mock(side_effect=OSError(28, "No space left on device")))
            write(target, learner)
        assert "The heads that learn were not saved: [Errno 28] No space left" in caplog.text
        assert learner.steps == 1
    assert (tmp_path / LEARNER).exists()


def test_several_processes_are_refused(learner, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="`OnlineLearner` works in one process, and there are 2"):
        learner.__enter__()


def test_another_target_is_refused(learner):
    with learner, pytest.raises(ValueError, match="`assistant_model` learns from another target"):
        write(make_target(), learner)


def test_heads_learn_from_one_learner_at_a_time(target, learner):
    with learner, pytest.raises(ValueError, match="`heads` are learning already"), learner_of(target, learner.heads):
        pass


def test_texts_are_forgotten_when_the_target_changes(target):
    learner = learner_of(target, share=0.0)
    with learner:
        for _ in range(2):
            write(target, learner)
        learner.step()
        assert learner.lessons.waiting
        assert learner.lessons.old
        with torch.no_grad():
            target.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        target.generate(PROMPT, assistant_model=learner.heads, max_new_tokens=1)
        assert learner.lessons.waiting == len(PROMPT[0])
        assert not learner.lessons.old


def test_heads_of_other_sizes_are_refused(target, tmp_path):
    learned(target, folder=tmp_path)
    other = CloverHeads.from_target(target, num_heads=2, variant="clover-2")
    with pytest.raises(ValueError, match=r"`folder` .* holds heads of other sizes than `heads`"):
        OnlineLearner(other, target, folder=tmp_path)


@pytest.mark.parametrize("share", [-1.0, 1.5])
def test_a_share_outside_0_to_1_is_refused(target, share):
    with pytest.raises(ValueError, match=f"`share={share}` must be from 0 to 1"):
        OnlineLearner(None, target, share=share)


def test_a_damaged_state_says_which_file_to_delete(target, tmp_path):
    learned(target, folder=tmp_path)
    (tmp_path / LEARNER).write_bytes(b"half")
    with pytest.raises(ValueError, match=r"learner.safetensors' is damaged .* delete it"):
        OnlineLearner(None, target, folder=tmp_path)
