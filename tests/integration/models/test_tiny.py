from __future__ import annotations

import filecmp
import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.errors import ServiceError
from headrace_services.trainer.data import arithmetic
from headrace_services.trainer.demo_models import tiny


def test_transformers_loads_it(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert 500_000 < model.num_parameters() < 560_000
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    logits = model(torch.tensor([tokenizer.encode("47+85")])).logits
    assert logits.shape == (1, 5, len(tokenizer))
    assert logits.isfinite().all()


def test_the_saved_tokenizer_is_the_made_one(tiny_model: Path) -> None:
    """transformers picks a class by the model's type when it loads; what it picks must read the files as they were meant."""
    loaded = AutoTokenizer.from_pretrained(tiny_model)
    text = "<sys>12<user>47+85 = 3*4-1<asst>132<eos><pad>"
    assert loaded.encode(text) == tiny.make_tokenizer().encode(text)
    assert len(loaded.encode(text)) == len("12") + len("47+85 = 3*4-1") + len("132") + 5
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.decode(loaded.encode(text), skip_special_tokens=True) == "1247+85 = 3*4-1132"
    assert (loaded.eos_token, loaded.pad_token) == ("<eos>", "<pad>")


def test_its_chat_template_writes_turns(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    turns = [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "47+85"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<sys>1<user>2+2<asst>4<eos><user>47+85<asst>"
    assert tiny.prompt_ids(tokenizer, "47+85") == tokenizer.encode("<user>47+85<asst>")


def test_the_same_seed_makes_the_same_model(tiny_model: Path, tmp_path: Path) -> None:
    tiny.make(tmp_path / "same", warmup=False)
    tiny.make(tmp_path / "other", warmup=False, seed=1)
    weights = "model.safetensors"
    assert filecmp.cmp(tiny_model / weights, tmp_path / "same" / weights, shallow=False)
    assert not filecmp.cmp(tiny_model / weights, tmp_path / "other" / weights, shallow=False)


def test_warm_up_gives_one_model_for_any_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "STEPS", 2)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tiny.make(tmp_path / str(threads))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert filecmp.cmp(*(tmp_path / threads / "model.safetensors" for threads in "12"), shallow=False)


def test_making_it_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    tiny.make(tmp_path / "model", warmup=False)
    assert torch.equal(torch.rand(4), expected)


def test_made_once(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    tiny.make(directory, warmup=False)
    stamp = (directory / "model.safetensors").stat().st_mtime_ns
    tiny.make(directory, warmup=False)
    assert (directory / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(ServiceError, match="holds a model made as"):
        tiny.make(directory, warmup=False, seed=1)


def test_a_directory_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ServiceError, match="remove it"):
        tiny.make(tmp_path, warmup=False)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny.Qwen2ForCausalLM, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        tiny.make(tmp_path / "model", warmup=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("pair", "sloppy"),
    [((47, 85), "22"), ((12, 34), "46"), ((5, 5), "0"), ((99, 99), "88"), ((3, 9), "2"), ((50, 50), "0")],
)
def test_the_sloppy_teacher_drops_every_carry(pair: tuple[int, int], sloppy: str) -> None:
    assert tiny.sloppy_answer(pair) == sloppy


def test_the_teacher_never_shows_a_held_out_pair() -> None:
    tokenizer = tiny.make_tokenizer()
    teacher = tiny.WarmUpData(tokenizer, tiny.sums(random.Random(0)))
    shown = set()
    wrong = 0
    rows = 0
    for _ in range(20):
        input_ids, labels = teacher.batch()
        for tokens, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
            question = tokenizer.decode(tokens).split("<user>")[1].split("<asst>")[0]
            answer = tokenizer.decode([t for t in label if t != -100])
            a, b = map(int, question.split("+"))
            shown.add((min(a, b), max(a, b)))
            assert answer in (f"{a + b}<eos>", f"{tiny.sloppy_answer((a, b))}<eos>")
            wrong += answer != f"{a + b}<eos>"
            rows += 1
    assert not shown & set(arithmetic.select_held_out(2))
    assert 0.35 < wrong / rows < 0.49  # 0.6 of the answers are sloppy, and 0.7 of the sums have a carry


def test_a_teacher_of_two_turns_asks_again_after_a_wrong_answer_alone() -> None:
    tokenizer = tiny.make_tokenizer()
    once, twice = (tiny.WarmUpData(tokenizer, tiny.sums(random.Random(0), turns)) for turns in (1, 2))
    _, labels_of_one = once.batch()
    input_ids, labels = twice.batch()
    seconds = 0
    for tokens, label in zip(input_ids.tolist(), labels.tolist(), strict=True):
        text = tokenizer.decode(tokens).replace("<pad>", "").removesuffix("<eos>")
        taught = tokenizer.decode([t for t in label if t != -100]).removesuffix("<eos>").split("<eos>")
        first, *again = text.removeprefix("<user>").split("<eos><user>")
        question, answer = first.split("<asst>")
        right = str(sum(map(int, question.split("+"))))
        assert answer == taught[0]
        assert len(again) == len(taught) - 1 == (taught[0] != right)
        if again:
            assert again == [f"-{question}<asst>{taught[1]}"]
            assert taught[1] in (right, tiny.sloppy_answer(tuple(map(int, question.split("+")))))  # type: ignore[arg-type]
            seconds += 1
    assert 0 < seconds < len(labels)
    assert labels.shape[1] > labels_of_one.shape[1]


@pytest.mark.slow
@pytest.mark.timeout(900)  # the model may be in the making
def test_the_warmed_up_model_is_right_some_of_the_time(warm_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(warm_model)
    tokenizer = AutoTokenizer.from_pretrained(warm_model)
    assert 0.25 < tiny.held_out_accuracy(model, tokenizer) < 0.5
    # it knows the right answers too: enough of them at temperature 1 for a group to differ in reward
    pairs = list(islice(arithmetic.validation_pairs(2, random.Random(0)), 100))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prompts = [tiny.prompt_ids(tokenizer, arithmetic.text(pair)) for pair in pairs if min(pair) > 9]
        output = model.generate(
            torch.tensor(prompts), max_new_tokens=6, do_sample=True, attention_mask=torch.ones(len(prompts), 7)
        )
    answers = [arithmetic.answer(pair) + "<eos>" for pair in pairs if min(pair) > 9]
    texts = tokenizer.batch_decode(output[:, 7:])
    right = sum(text.startswith(answer) for text, answer in zip(texts, answers, strict=True))
    assert right / len(answers) > 0.3
