"""Acceptance figures: what they are made of, what stands beside them, and the command that prints them."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from dflash import acceptance, settings
from dflash.__main__ import main
from dflash.acceptance import Conditions, answer, distinct4, interval, measure, table
from dflash.attention import attend_dense, visible
from dflash.drafter import Drafter, Geometry
from dflash.evaluator import Evaluator, prompt_sets
from dflash.export import export_drafter
from dflash.settings import SettingError
from dflash.speculate import Response
from dflash.target import Target
from dflash.weights import draw

WORDS = [*"abcdefgh", "user", "assistant", "end", "<mask>"]
CPU = torch.device("cpu")
TAPS = [1, 3]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' + m.content + ' end ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="end", chat_template=template)


def make_model(hidden=32):
    torch.manual_seed(1)
    config = tf.Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=WORDS.index("end"),
    )
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.get_output_embeddings().weight.data /= 4
    return model


def make_drafter(hidden=32, block=4, seed=2):
    target = Target.from_model(make_model(hidden), TAPS, [CPU])
    geometry = Geometry.settle(settings.Drafter(layers=2, block=block), target)
    drafter = Drafter(geometry, visible, attend_dense, draw(geometry, seed))
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10
    return drafter, target


def ask(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


PROMPTS = ask("a b c", "d", "e f g h a b", "c c")
HOW = {"max_new": 24, "temperature": 0.0, "batch": 3, "seed": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> SimpleNamespace:
    """A target and a drafter on disk, and two prompt files: one of two user turns, one of one."""
    root = tmp_path_factory.mktemp("acceptance")
    make_model().save_pretrained(root / "target")
    make_tokenizer().save_pretrained(root / "target")
    drafter, target = make_drafter()
    export_drafter(drafter, target, WORDS.index("<mask>"), root / "drafter")
    two = [{"messages": [*ask(text)[0], *ask("h g")[0]]} for text in ("a b", "c d e", "f")]
    (root / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in two))
    (root / "one.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in PROMPTS))
    return SimpleNamespace(root=root, target=root / "target", drafter=root / "drafter")


def measured(monkeypatch, rounds, plain=None, block=4, prompts=PROMPTS, **changes):
    """`measure` with decoding played from a script: `rounds` of each response."""

    def played(model, ids, speculation, **how):
        responses = [Response(list(range(1 + sum(r))), list(r)) for r in script[: len(ids)]]
        del script[: len(ids)]
        return responses

    script = [*([[1] * n for n in plain or map(sum, rounds)]), *([[1]] * acceptance.UNTRAINED)[: HOW["batch"]], *rounds]
    monkeypatch.setattr(acceptance, "decode", played)
    drafter, _ = make_drafter(block=block)
    return measure(make_model(), make_tokenizer(), drafter, 11, TAPS, prompts, **(HOW | changes))


def test_tau_is_the_mean_of_the_responses_means_and_the_rest_says_how_it_came_about(monkeypatch):
    got = measured(monkeypatch, [[4, 4, 1], [1], [2, 2], []], plain=[9, 1, 5, 0], name="four")
    assert got.tau == pytest.approx((3 + 1 + 2) / 3)
    assert got.tau_pooled == pytest.approx(14 / 6)
    assert (got.set, got.n, got.responses, got.rounds, got.tokens) == ("four", 4, 4, 6, 14 + 4)
    assert got.histogram == [2, 2, 0, 2]
    assert got.accept_at == pytest.approx([4 / 6, 2 / 6, 2 / 6])
    assert got.identical == 0.75  # the third was longer without speculation
    assert (got.tau_untrained, got.n_untrained) == (1.0, 3)
    assert got.tau_low < got.tau < got.tau_high
    assert [r["rounds"] for r in got.per_response] == [[4, 4, 1], [1], [2, 2], []]
    assert [r["tau"] for r in got.per_response] == [3, 1, 2, None]
    assert "per_response" not in got.to_dict(per_response=False)
    json.dumps(got.to_dict(), allow_nan=False)


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=9), min_size=4, max_size=4))
@hypothesis_settings(max_examples=20, deadline=None)
def test_the_pooled_tau_is_one_and_the_shares_of_accepted_slots(rounds):
    with pytest.MonkeyPatch.context() as monkeypatch:
        got = measured(monkeypatch, rounds)
    assert got.tau_pooled == pytest.approx(1 + sum(got.accept_at))
    assert sum(got.histogram) == got.rounds == sum(map(len, rounds))
    assert got.accept_at == sorted(got.accept_at, reverse=True)
    assert got.tau_low <= got.tau + 1e-9
    assert got.tau_high >= got.tau - 1e-9


def test_nothing_to_count_is_none_and_no_crash(monkeypatch):
    got = measured(monkeypatch, [[], [], [], []])
    assert got.tau is got.tau_low is got.tau_pooled is None
    assert got.histogram == [0, 0, 0, 0]
    assert "tau" in table([got])


def test_a_loop_shows_in_distinct_4_grams():
    assert distinct4([1, 2, 3, 4, 5, 6, 7]) == 1
    assert distinct4([7] * 100) == 1 / 97
    assert distinct4([1, 2, 3]) is None


def test_the_interval_resamples_prompts_not_responses():
    rng = np.random.default_rng(0)
    alone = [[float(v)] for v in rng.normal(3, 1, 50)]
    low, high = interval(alone)
    mean = np.mean(alone)
    assert low < mean < high
    assert high - low == pytest.approx(2 * 1.96 * np.std(alone) / 50**0.5, rel=0.15)
    # Ten like turns of a prompt tell no more than one.
    assert interval([v * 10 for v in alone]) == pytest.approx((low, high))
    assert interval([[2.0, 3.0]]) == (None, None)


def test_a_real_drafter_gives_the_targets_own_responses_and_leaves_no_trace():
    model, tokenizer, (drafter, _) = make_model(), make_tokenizer(), make_drafter()
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    drafter.train().requires_grad_(True)
    random = torch.get_rng_state()
    seen = []
    got = measure(model, tokenizer, drafter, 11, TAPS, PROMPTS, **HOW, progress=lambda *at: seen.append(at))
    assert got.identical == 1
    assert 1 <= got.tau <= 4
    assert 1 <= got.tau_untrained <= 4
    assert (got.dtype, got.block, got.device) == ("float32", 4, "cpu")
    assert seen[-1] == (4, 4)
    assert torch.equal(random, torch.get_rng_state())  # training goes on as if nothing had been measured
    assert drafter.training
    assert all(p.requires_grad and p.grad is None for p in drafter.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())


def test_figures_do_not_depend_on_the_batch():
    model, tokenizer, (drafter, _) = make_model().double(), make_tokenizer(), make_drafter()
    one, four = (measure(model, tokenizer, drafter, 11, TAPS, PROMPTS, **HOW | {"batch": batch}) for batch in (1, 4))
    assert one.per_response == four.per_response
    assert (one.tau, one.tau_low, one.accept_at) == (four.tau, four.tau_low, four.accept_at)


def test_all_but_how_long_it_took_is_the_same_the_next_time():
    model, tokenizer, (drafter, _) = make_model(), make_tokenizer(), make_drafter()
    one, two = (measure(model, tokenizer, drafter, 11, TAPS, PROMPTS, **HOW) for _ in range(2))
    assert one.to_dict() | {"seconds": 0} == two.to_dict() | {"seconds": 0}
    assert table([one]) == table([two])


def test_sampled_figures_repeat_with_the_seed():
    model, tokenizer, (drafter, _) = make_model(), make_tokenizer(), make_drafter()
    runs = [
        measure(model, tokenizer, drafter, 11, TAPS, PROMPTS, **HOW | {"temperature": 1.0, "seed": seed})
        for seed in (5, 5, 6)
    ]
    assert runs[0].per_response == runs[1].per_response != runs[2].per_response
    assert runs[0].identical is None


def test_later_turns_follow_the_targets_own_responses():
    model, tokenizer = make_model(), make_tokenizer()
    messages = [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "what somebody else said"},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    asked = answer(model, tokenizer, [messages, PROMPTS[0]], Conditions(6, 0.0, 8, 0)).asked
    mine = [turn for turn in asked if turn.prompt == 0]
    assert [turn.turn for turn in mine] == [0, 1, 2]
    for number, turn in enumerate(mine):
        text = "user a b end "
        for earlier, say in zip(mine[:number], ("c", "d"), strict=False):
            said = [t for t in earlier.answer if WORDS[t] != "end"]
            text += "assistant " + " ".join(WORDS[t] for t in said) + f" end user {say} end "
        assert turn.ids == tokenizer(text + "assistant ")["input_ids"]
        assert turn.answer[-1] == WORDS.index("end") or len(turn.answer) == 6


def test_one_evaluator_answers_once_and_measures_any_number_of_drafters(folders, monkeypatch):
    wish = settings.Eval(prompts=[str(folders.root / "two.jsonl")], limit=2, max_new=8)
    evaluator = Evaluator(settings.Target(model=str(folders.target)), wish, CPU)
    plain = []
    decode = acceptance.decode
    monkeypatch.setattr(
        acceptance, "decode", lambda m, ids, s, **how: (plain.append(s is None), decode(m, ids, s, **how))[1]
    )
    (first,) = evaluator(make_drafter()[0].bfloat16(), 11, TAPS)
    (second,) = evaluator(make_drafter(seed=3)[0], 11, TAPS)
    assert plain == [True, True, False, False, False, False, False]  # two turns; untrained, and two turns a drafter
    assert (first.set, first.n, first.responses, first.dtype) == ("two", 2, 4, "float32")
    assert first.tau_untrained == second.tau_untrained
    (shorter,) = evaluator(make_drafter(block=2)[0], 11, TAPS)
    assert shorter.block == 2
    assert shorter.tau_untrained <= 2


def run_eval(folders, capfd, *words, **changes):
    """`python -m dflash eval` without a new process: its status, what it printed, and what it complained of."""
    given = {"--drafter": folders.drafter, "--target": folders.target, "--prompts": folders.root / "one.jsonl"}
    command = [str(word) for pair in (given | changes).items() for word in pair] + [str(word) for word in words]
    capfd.readouterr()
    status = main(["eval", "--device", "cpu", "--max-new", "12", *command])
    return status, *capfd.readouterr()


def test_the_command_prints_every_figure_with_its_conditions_and_writes_them(folders, tmp_path, capfd):
    out = tmp_path / "acceptance.json"
    status, printed, _ = run_eval(folders, capfd, folders.root / "two.jsonl", "--limit", 3, "--json", out)
    assert status == 0
    one, two = json.loads(out.read_text())["sets"]
    assert (one["set"], one["n"], one["responses"]) == ("one", 3, 3)
    assert (two["set"], two["n"], two["responses"]) == ("two", 3, 6)
    assert one["identical"] == two["identical"] == 1
    assert sum(one["histogram"]) == one["rounds"] == sum(len(r["rounds"]) for r in one["per_response"])
    for figures in (one, two):
        (line,) = re.findall(rf"^{figures['set']} .*", printed, re.M)
        cells = line.split()
        assert cells[1:7] == ["3", *(str(figures[key]) for key in ("responses", "tokens")), "0", "4", cells[6]]
        assert float(cells[6]) == pytest.approx(figures["tau"], abs=0.005)
        assert f"{figures['tau_low']:.2f}..{figures['tau_high']:.2f}" in line
        assert f"{figures['tau_untrained']:.2f} ({figures['n_untrained']})" in line
    assert "At most 12 tokens a response, 16 prompts at a time, float32 on cpu, seed 0" in printed
    assert "mean of the sets' tau" in printed


@pytest.mark.parametrize(
    ("changes", "words", "text"),
    [
        ({"--drafter": "nowhere"}, (), "dflash: --drafter=nowhere: must hold"),
        ({"--device": "abacus"}, (), "dflash: --device=abacus: must be"),
        ({"--target": "nowhere"}, (), "dflash: --target=nowhere: must be"),
        ({"--prompts": "nowhere.jsonl"}, (), "dflash: --prompts=nowhere.jsonl: must be"),
        ({}, ("--temperature", "-1"), "dflash: --temperature=-1.0: must be from 0"),
        ({}, ("--json", "nowhere/out.json"), "dflash: --json=nowhere/out.json: must be a file that can be written"),
    ],
)
def test_what_cannot_work_is_told_in_one_sentence(folders, capfd, changes, words, text):
    status, _, complaint = run_eval(folders, capfd, *words, **changes)
    assert status == 2
    assert complaint.startswith(text)
    assert complaint.count("\n") == 1


def test_a_drafter_of_another_target_is_refused():
    model, tokenizer = make_model(), make_tokenizer()
    for drafter, mask_token, taps, text in (
        (make_drafter(hidden=24)[0], 11, TAPS, "drafter.hidden=24: must equal the target's hidden size 32"),
        (make_drafter()[0], 12, TAPS, "drafter.mask_token=12: must be one of the target's 12"),
        (make_drafter()[0], 11, [1, 6], r"target.taps=\[1, 6\]: must be below 6"),
    ):
        with pytest.raises(SettingError, match=text):
            measure(model, tokenizer, drafter, mask_token, taps, PROMPTS, **HOW)


def test_prompts_that_cannot_be_asked_are_refused_by_number(tmp_path):
    refusing = make_tokenizer("{{ raise_exception('no letters, please') }}")
    with pytest.raises(SettingError, match=r"eval\.prompts=: prompt 1 is refused .*no letters, please"):
        answer(make_model(), refusing, PROMPTS, Conditions(4, 0.0, 8, 0))
    begins = [*PROMPTS, [{"role": "assistant", "content": "a"}, *PROMPTS[0]]]
    with pytest.raises(SettingError, match="prompt 5 cannot be answered"):
        answer(make_model(), make_tokenizer(), begins, Conditions(4, 0.0, 8, 0))
    with pytest.raises(SettingError, match="chat template"):
        answer(make_model(), make_tokenizer(template=None), PROMPTS, Conditions(4, 0.0, 8, 0))


def test_a_template_is_told_not_to_think_if_it_knows_how():
    model, knows = make_model(), make_tokenizer(TEMPLATE + "{{ 'a' if enable_thinking is false else 'b' }}")
    for thinking, word in ((False, "a"), (True, "b")):
        asked = answer(model, knows, PROMPTS[:1], Conditions(2, 0.0, 8, 0, thinking)).asked
        assert WORDS[asked[0].ids[-1]] == word
    asked = answer(model, make_tokenizer(), PROMPTS[:1], Conditions(2, 0.0, 8, 0, thinking=False)).asked
    assert WORDS[asked[0].ids[-1]] == "assistant"


def test_sets_of_one_name_stay_apart(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.jsonl").write_text(json.dumps({"messages": PROMPTS[0]}) + "\n")
    files = [tmp_path / "x" / "same.jsonl", tmp_path / "y" / "same.jsonl"]
    assert list(prompt_sets(files)) == [str(file) for file in files]
