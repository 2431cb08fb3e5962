"""Prompt sets: each kind of file, chat templates, and the functions that the stand-in has not seen."""

import ast
import json
import textwrap

import pytest
from helpers.byte_tokens import byte_tokenizer

from hf_clover.measure.prompts import (
    HELD_OUT,
    function_starts,
    functions,
    held_out_sources,
    load_prompts,
    load_questions,
)

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% endif %}"
)


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def texts(name, tokenizer, **options):
    return [tokenizer.decode(ids) for ids in load_prompts(str(name), tokenizer, **options)]


def test_the_stand_ins_prompts_are_starts_of_held_out_functions(tokenizer):
    found = texts("stand-in", tokenizer, limit=12)
    assert len(found) == len(set(found)) == 12
    sources = held_out_sources()
    assert set(sources) == set(HELD_OUT)
    known = {text: name for name, source in sources.items() for _, text, _ in functions(source)}
    modules = set()
    for start in found:
        text, module = next((text, name) for text, name in known.items() if text.startswith(start))
        assert text != start, "something is left to complete"
        assert ast.get_docstring(ast.parse(text).body[0]), text
        modules.add(module)
    assert len(modules) > 6, "of many modules, not of one"


def test_functions_are_cut_after_their_docstring():
    documented = 'def f(self):\n    """Doc."""\n    x = 1\n    return x\n'
    source = "class A:\n" + textwrap.indent(documented, "    ") + "\n    def g(self):\n        pass\n"
    assert list(functions(source)) == [("f", documented, 2)]
    assert all(start.count("\n") >= 2 and not start.endswith("\n") for start in function_starts())


def test_prompts_are_read_from_question_and_text_files(tokenizer, tmp_path):
    questions = tmp_path / "question.jsonl"
    rows = [{"question_id": 81, "turns": ["First?", "Then?"]}, {"question_id": 82, "turns": ["Another?"]}]
    questions.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert texts(questions, tokenizer) == ["First?", "Another?"]
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n\n  \ntwo\nthree\n")
    assert texts(lines, tokenizer, limit=2) == ["one", "two"]


def test_a_chat_template_is_applied_to_questions_and_not_to_code(tokenizer, tmp_path):
    tokenizer.chat_template = TEMPLATE
    questions = tmp_path / "question.jsonl"
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rows = [{"turns": ["First?"]}, {"messages": [*told, {"role": "assistant", "content": "Hello"}]}]
    questions.write_text("\n".join(map(json.dumps, rows)))
    assert texts(questions, tokenizer) == ["[user] First?\n[answer]", "[system] Be brief.\n[user] Hi\n[answer]"]
    assert "[user]" not in texts("stand-in", tokenizer, limit=1)[0], "code is not a question"


def test_prompts_are_read_from_a_dataset_folder(tokenizer, tmp_path):
    from datasets import Dataset

    Dataset.from_dict({"instruction": ["Do this.", "Do that."]}).to_json(tmp_path / "data" / "train.jsonl")
    assert texts(tmp_path / "data", tokenizer) == ["Do this.", "Do that."]


def test_a_file_without_prompts_is_refused(tokenizer, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"`prompts='.*empty.txt'` holds no prompt"):
        load_prompts(str(tmp_path / "empty.txt"), tokenizer)
    (tmp_path / "odd.jsonl").write_text('{"number": 3}\n')
    with pytest.raises(ValueError, match=r"no field of \['number'\] is a prompt; known are \['messages', 'turns'"):
        load_prompts(str(tmp_path / "odd.jsonl"), tokenizer)


def questions_in(tmp_path, rows):
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_questions_are_taken_from_each_category_in_turn(tokenizer, tmp_path):
    rows = [
        {"question_id": i, "category": c, "turns": ["a", "b"]} for i, c in enumerate(("math", "math", "math", "qa"))
    ]
    name = questions_in(tmp_path, rows)
    assert [question.id for question in load_questions(name, tokenizer)] == [0, 3, 1, 2]
    assert [question.id for question in load_questions(name, tokenizer, limit=2)] == [0, 3]
    assert [question.id for question in load_questions(name, tokenizer, per_category=2)] == [0, 3, 1]


def test_a_turns_prompt_holds_the_turns_before_it(tokenizer, tmp_path):
    (question,) = load_questions(questions_in(tmp_path, [{"prompt": ["First?", "Then?"]}]), tokenizer)
    assert tokenizer.decode(question.encode(tokenizer, ["So."])) == "First?\n\nSo.\n\nThen?"
    tokenizer.chat_template = TEMPLATE
    said = "[user] First?\n[assistant] So.\n[user] Then?\n[answer]"
    assert tokenizer.decode(question.encode(tokenizer, ["So."])) == said


def test_unknown_and_missing_categories_are_logged(tokenizer, tmp_path, caplog):
    rows = [{"category": "math", "turns": ["a"]}, {"category": "maths", "turns": ["b"]}, {"turns": ["c"]}]
    found = load_questions(questions_in(tmp_path, rows), tokenizer)
    assert [question.category for question in found] == ["math", "maths", "none"]
    assert "1 of 3 questions have no `category`; their results are listed under 'none'" in caplog.text
    assert "Spec-Bench has no category 'maths'; taken as named" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt"),
        ('{"turns": [], "category": "qa"}', r"question 1: no field of \['category', 'turns'\] is a prompt"),
        ('{"turns": ["a", 3]}', "question 1: `turns` must hold texts, or messages"),
        ('{"turns": ["a"]}\n{"turns"', "line 2 is not JSON"),
        ('[{"turns": ["a"]}]', "line 1 is no JSON object"),
    ],
)
def test_bad_question_files_are_refused_with_the_reason(tokenizer, tmp_path, text, said):
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(ValueError, match=said):
        load_questions(str(tmp_path / "q.jsonl"), tokenizer)


def test_per_category_without_categories_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"`per_category=2`: no prompt of .* has a `category`; pass `num_prompts`"):
        load_questions(questions_in(tmp_path, [{"turns": ["a"]}]), tokenizer, per_category=2)


def test_a_chat_target_is_asked_everyday_questions_by_default():
    from helpers.tiny_text import CHAT_TEMPLATE, make_tokenizer

    from hf_clover.measure.prompts import QUESTIONS, default_prompts

    tokenizer = make_tokenizer()
    assert default_prompts(tokenizer) == "stand-in"
    tokenizer.chat_template = CHAT_TEMPLATE
    assert default_prompts(tokenizer) == "everyday"
    asked = load_questions("everyday", tokenizer, limit=3)
    assert [question.turns[0][0]["content"] for question in asked] == list(QUESTIONS[:3])
    assert len(load_questions("everyday", tokenizer)) == len(QUESTIONS) == 8


def test_a_target_in_a_folder_called_target_is_named_by_type_and_size():
    from helpers.tiny_text import make_target

    from hf_clover.measure.conditions import circumstances

    target = make_target()
    for folder, said in (("runs/target", "llama-21K"), ("org/SmolLM2", "SmolLM2"), ("", "llama-21K")):
        target.config.name_or_path = folder
        assert circumstances(target, "everyday", [], 8)["target"] == said
