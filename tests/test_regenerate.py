from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from dflash.__main__ import main
from dflash.data import chat
from dflash.data.chat import BadRow
from dflash.regenerate.generate import Model, Sampling, _draw, draws, generate
from dflash.regenerate.turns import turns

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking is false %}<no>{% endif %}{% endif %}"
)
SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # wild enough that the likeliest token is never a near tie
    "tie_word_embeddings": False,
}


def byte_tokenizer():
    """One token a byte, and marks of turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_model(kind="llama"):
    torch.manual_seed(0)
    if kind == "llama":
        lm = LlamaForCausalLM(LlamaConfig(**SIZES))
    elif kind == "gemma3":  # every other layer sees 8 tokens back
        lm = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8, sliding_window_pattern=2))
    else:
        del (sizes := dict(SIZES))["num_key_value_heads"], sizes["head_dim"]
        lm = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))
    lm.generation_config.eos_token_id = None
    return Model.of(lm, byte_tokenizer())


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a small random target."""
    folder = tmp_path_factory.mktemp("target")
    model = random_model()
    model.lm.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


def write(path, *conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


def say(*texts):
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def run(*argv):
    return main(["regenerate", *map(str, argv)])


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- where responses are made -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u", ["u"]),
        ("ua", ["u"]),
        ("sua", ["su"]),
        ("uau", ["u", "u"]),
        ("uu", ["u", "u"]),
        ("uauua", ["u", "u", "u"]),
        ("uaau", ["u", "u"]),
        ("us", ["us"]),
        ("uas", ["u"]),
    ],
)
def test_a_response_is_made_for_every_assistant_turn_and_every_unanswered_user_turn(roles, expected):
    names = {"u": "user", "a": "assistant", "s": "system"}
    messages = [{"role": names[role], "content": str(at)} for at, role in enumerate(roles)]
    assert ["".join(m["role"][0] for m in said) for said in turns(messages)] == expected


@pytest.mark.parametrize("roles", ["a", "au", "s", "uat"])
def test_conversations_that_the_target_cannot_have_had_are_refused(roles):
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    with pytest.raises(BadRow):
        turns([{"role": names[role], "content": ""} for role in roles])


# --- generation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox"])
def test_greedy_responses_are_those_of_transformers(kind):
    model = random_model(kind)
    choose = np.random.default_rng(1)
    prompts = [choose.integers(0, 256, size=length).tolist() for length in (3, 40, 17, 1, 25, 9, 70, 12)]
    new = 100  # more than the step by which the cache grows

    def alone(prompt):
        out = model.lm.generate(
            torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=model.stops, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    model.stops = [258]
    counts = Counter(token for prompt in prompts for token in set(alone(prompt)[5:60]))
    model.stops = [token for token, _ in counts.most_common(2)]  # so that some end early, at different times
    expected = [alone(prompt) for prompt in prompts]
    assert len({len(response) for response in expected}) > 3
    assert generate(model, prompts, Sampling(new), np.zeros((len(prompts), new))) == expected


def test_drawn_responses_do_not_depend_on_their_company():
    model = random_model()
    prompts = [[1, 2, 3], [7] * 30, [9, 8], [100, 50, 25, 12]]
    sampling = Sampling(20, temperature=1.0, top_p=0.9)
    chance = np.stack([draws(5, line, 0, 20) for line in range(4)])
    together = generate(model, prompts, sampling, chance)
    assert together == [generate(model, [p], sampling, chance[at : at + 1])[0] for at, p in enumerate(prompts)]
    assert together != generate(model, prompts, sampling, np.stack([draws(6, line, 0, 20) for line in range(4)]))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=12),
    st.floats(0.3, 3.0),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
)
def test_tokens_are_drawn_from_the_nucleus_in_proportion(logits, temperature, top_p):
    number = 2000
    lots = (torch.arange(number) + 0.5) / number
    drawn = _draw(torch.tensor(logits).expand(number, -1), Sampling(1, temperature, top_p), lots)
    chances = np.exp(np.array(logits) / temperature)
    chances /= chances.sum()
    order = np.argsort(-chances, kind="stable")
    before = np.cumsum(chances[order]) - chances[order]
    share = drawn.bincount(minlength=len(logits)).numpy() / number
    certain = np.abs(before - top_p) > 1e-4  # at the very edge rounding decides
    if certain.all():
        kept = np.zeros(len(logits), bool)
        kept[order[before < top_p]] = True
        assert np.abs(share - np.where(kept, chances, 0) / chances[kept].sum()).max() < 2 / number + 1e-4


# --- the command, with the target here ----------------------------------------------------------


def test_rows_come_out_in_order_each_with_responses_in_place(target, tmp_path, capfd):
    prompts = write(
        tmp_path / "p.jsonl",
        say("a long question about many things"),
        say("Hi", "old words", "And?", "older words"),
        [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}],
        say("x" * 600),
        [{"role": "assistant", "content": "Welcome"}, *say("Hi")],
    )
    out = tmp_path / "out.jsonl"
    assert run("--prompts", prompts, "--target", target, "--out", out, "--max-new", 12, "--batch", 2) == 0
    made = rows(out)
    assert [row["prompt"] for row in made] == [1, 2, 3]
    assert ["".join(m["role"][0] for m in row["messages"]) for row in made] == ["ua", "uaua", "uaua"]
    assert "old" not in json.dumps(made[1])
    said = capfd.readouterr().err
    assert "1 (leaves no room for a response in the target's 512 positions)" in said
    assert "1 (begins with an assistant turn)" in said
    assert len(chat.read(out)[0]) == 3


def test_batches_change_nothing_and_settings_do(target, tmp_path):
    prompts = write(tmp_path / "p.jsonl", *[say("q" * length, "", "more", "") for length in (3, 60, 9, 30, 1)])

    def made(name, *more):
        out = tmp_path / name
        assert run("--prompts", prompts, "--target", target, "--out", out, "--max-new", 16, *more) == 0
        return out.read_bytes()

    whole = made("a", "--batch", 1)
    assert whole == made("b", "--batch", 3) == made("c")
    drawn = made("d", "--temperature", 1, "--batch", 1)
    assert drawn == made("e", "--temperature", 1) != whole
    assert drawn != made("f", "--temperature", 1, "--seed", 1)
    assert whole != made("g", "--no-thinking")
    assert whole.startswith(made("h", "--limit", 2))


def test_a_response_that_was_not_cut_ends_where_the_target_ended_it(target, tmp_path):
    prompts = write(tmp_path / "p.jsonl", *[say(f"question {number}") for number in range(40)])
    out = tmp_path / "out.jsonl"
    assert run("--prompts", prompts, "--target", target, "--out", out, "--max-new", 200, "--temperature", 1) == 0
    answers = [row["messages"][1] for row in rows(out)]
    assert 0 < sum("cut" in answer for answer in answers) < len(answers)
    assert not any("<|end|>" in answer["content"] for answer in answers)


def test_it_goes_on_where_it_was_stopped(target, tmp_path, capfd):
    prompts = write(tmp_path / "p.jsonl", say("Hi"), say("Hello", ""), say("word " * 60), say("Good day"))
    out = tmp_path / "out.jsonl"
    argv = ["--prompts", prompts, "--target", target, "--out", out, "--max-new", 5, "--batch", 2, "--fit", 80]
    assert run(*argv) == 0
    assert "left out: 1 (longer than 80 tokens)" in capfd.readouterr().err
    whole = out.read_bytes()
    assert [row["prompt"] for row in rows(out)] == [1, 2, 4]
    first = whole.index(b"\n") + 1
    for kept in (0, 5, first - 1, first, first + 20, len(whole)):
        out.write_bytes(whole[:kept])  # killed there
        assert run(*argv) == 0
        assert out.read_bytes() == whole


def test_a_batch_that_does_not_fit_in_memory_is_halved(target, tmp_path, monkeypatch):
    prompts = write(tmp_path / "p.jsonl", *[say(f"question {number}") for number in range(7)])
    argv = ["--prompts", prompts, "--target", target, "--max-new", 8, "--out"]
    assert run(*argv, tmp_path / "a") == 0

    def small(model, prompts, *rest):
        if len(prompts) > 2:
            raise torch.OutOfMemoryError("no room")
        return generate(model, prompts, *rest)

    monkeypatch.setattr("dflash.regenerate.local.generate", small)
    assert run(*argv, tmp_path / "b") == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_of_another_origin_is_refused_and_left_alone(target, tmp_path, capfd):
    prompts, mine = write(tmp_path / "p.jsonl", say("Hi")), tmp_path / "mine.jsonl"
    argv = ["--prompts", prompts, "--target", target, "--max-new", 4, "--out"]
    for content in (json.dumps({"messages": say("a", "b")}) + "\n", "{", '{"prompt": 1}\nnotes\n'):
        mine.write_text(content)
        assert run(*argv, mine) == 2
        assert "was not written by this command" in capfd.readouterr().err
        assert mine.read_text() == content
    out = tmp_path / "out.jsonl"
    assert run(*argv, out) == 0
    whole = out.read_bytes()
    capfd.readouterr()
    for change, told in (
        (["--max-new", "5"], "was begun with --max-new=4, not 5"),
        (["--temperature", "1"], "was begun with --temperature=0.0, not 1.0"),
        (["--prompts", write(tmp_path / "q.jsonl", say("Hey"))], "was begun with other prompts"),
    ):
        assert run(*argv, out, *change) == 2
        assert told in capfd.readouterr().err
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--target", "nowhere"], "dflash: --target=nowhere: must be an existing Hugging Face model folder"),
        (["--server", "http://localhost:1"], "either --target or --server"),
        (["--max-new", "0"], "--max-new=0: must be 1 or more"),
        (["--temperature", "-1"], "--temperature=-1.0: must be from 0"),
        (["--top-p", "0"], "--top-p=0.0: must be above 0"),
        (["--prompts", "nowhere"], "--prompts=nowhere: must be an existing file"),
        (["--prompts", os.devnull], "must be an existing file"),
        (["--prompts", "empty.jsonl"], "--prompts=empty.jsonl: must hold at least one conversation"),
        (["--prompts", "broken.jsonl"], "line 1: broken JSON"),
        (["--prompts", "broken.jsonl"], "mend the row or set --bad-rows=skip"),
        (["--out", "nowhere/out.jsonl"], "must be a file in an existing folder"),
    ],
)
def test_a_wrong_setting_is_told_in_one_sentence(change, told, target, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    Path("broken.jsonl").write_text("{")
    prompts = write(tmp_path / "p.jsonl", say("Hi"))
    assert run("--prompts", prompts, "--target", target, "--out", tmp_path / "out.jsonl", *change) == 2
    err = capfd.readouterr().err
    assert told in err
    assert err.strip().count("\n") == 0


# --- the command, with a server -----------------------------------------------------------------


class Served:
    """A chat server that says the last user message backwards; `behave` may do something else first."""

    def __init__(self):
        self.asked = Counter()  # by content of the last message
        self.bodies, self.headers = [], []
        self.now = self.most = 0
        self.lock = threading.Lock()

    def behave(self, handler, body, times):
        """Answer the request oneself and return True, or leave it to the default."""
        return False

    @contextmanager
    def up(self, port=0):
        served = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                served.headers.append(dict(self.headers))
                self.give({"data": [{"id": "backwards"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                last = body["messages"][-1]["content"]
                with served.lock:
                    served.asked[last] += 1
                    served.now += 1
                    served.most = max(served.most, served.now)
                    served.bodies.append((self.path, body))
                    served.headers.append(dict(self.headers))
                    times = served.asked[last]
                if not served.behave(self, body, times):
                    self.say(last[::-1])

            def say(self, content, reason="stop", **more):
                message = {"role": "assistant", "content": content} | more
                choices = [{"message": message, "finish_reason": reason}]
                self.give({"choices": choices, "usage": {"completion_tokens": 7}})

            def give(self, answer, status=200, **headers):
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                if self.command == "POST":
                    with served.lock:
                        served.now -= 1  # before the answer: who has it may ask again at once
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()


def served(behave=None):
    one = Served()
    if behave:
        one.behave = behave
    return one


def questions(path, number):
    return write(path, *[say(f"question {at}") for at in range(number)])


def test_a_server_answers_in_order_with_a_bounded_number_of_requests(tmp_path, capfd):
    def slow_first(handler, body, times):
        time.sleep(0.3 if body["messages"][-1]["content"] == "question 0" else 0.01)

    one = served(slow_first)
    prompts, out = questions(tmp_path / "p.jsonl", 40), tmp_path / "out.jsonl"
    with one.up() as url:
        assert run("--prompts", prompts, "--server", url, "--out", out, "--parallel", 4, "--max-new", 9) == 0
    assert [row["messages"][1]["content"] for row in rows(out)] == [f"question {at}"[::-1] for at in range(40)]
    assert 1 < one.most <= 4
    path, body = one.bodies[0]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("backwards", 9, 0.0)
    assert "40/40 conversations, 280 tokens" in capfd.readouterr().err


def test_what_the_server_says_of_a_response_is_kept(tmp_path):
    def behave(handler, body, times):
        if body["messages"][-1]["content"] == "deep":
            handler.say("answer", reason="length", reasoning_content="thoughts")
            return True
        return False

    prompts, out = write(tmp_path / "p.jsonl", say("deep", "", "on", "")), tmp_path / "out.jsonl"
    one = served(behave)
    with one.up() as url:
        argv = ["--prompts", prompts, "--out", out, "--server", url + "/v1/", "--server-model", "m", "--no-thinking"]
        assert run(*argv, "--temperature", 1, "--top-p", 0.9) == 0
    (row,) = rows(out)
    assert row["messages"][1] == {
        "role": "assistant",
        "content": "answer",
        "reasoning_content": "thoughts",
        "cut": True,
    }
    assert row["messages"][3] == {"role": "assistant", "content": "no"}
    _, second = one.bodies[1]
    assert second["messages"] == [*say("deep", "answer", "on")]  # no key that a server may not know
    assert second["chat_template_kwargs"] == {"enable_thinking": False}
    assert (second["model"], second["top_p"]) == ("m", 0.9)
    assert second["seed"] != one.bodies[0][1]["seed"]


def test_what_passes_by_itself_is_asked_again(tmp_path):
    def behave(handler, body, times):
        kind = int(body["messages"][-1]["content"].split()[-1]) % 6
        if times > 2 or kind == 5:
            return False
        if kind == 0:
            handler.give({"error": "loading"}, status=503)
        elif kind == 1:
            handler.give(b"<html>nonsense", status=200)
        elif kind == 2:
            handler.give({"choices": []})
        elif kind == 3:
            handler.give({}, status=429, Retry_After="0.1")
        else:
            handler.connection.close()
        return True

    prompts, out = questions(tmp_path / "p.jsonl", 12), tmp_path / "out.jsonl"
    with served(behave).up() as url:
        assert run("--prompts", prompts, "--server", url, "--out", out, "--parallel", 12) == 0
    assert len(rows(out)) == 12


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda h: h.give({"error": "no such model"}, status=404), "answers 404: "),
        (lambda h: h.give({"error": f"bad key {h.headers['Authorization']}"}, status=401), "answers 401: "),
        (lambda h: h.give({}, status=307, Location="http://127.0.0.1:1/elsewhere"), "answers 307: "),
        (lambda h: h.give({"error": "too long"}, status=400), "answers 400: "),
        (lambda h: h.give(b"\xff\xfe"), "its answer is not JSON"),
        (lambda h: h.give({"choices": [{"message": {"content": 3}}]}), "not that of a chat server"),
    ],
)
def test_what_will_not_pass_is_told_in_one_sentence_without_the_key(answer, told, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame-open")
    one = served(lambda handler, body, times: answer(handler) or True)
    prompts, out = questions(tmp_path / "p.jsonl", 40), tmp_path / "out.jsonl"
    with one.up() as url:
        argv = ["--prompts", prompts, "--server", url, "--out", out, "--api-key-env", "MY_KEY", "--patience", 0.5]
        assert run(*argv, "--parallel", 4) == 2
    err = capfd.readouterr().err
    assert told in err
    assert err.strip().count("\n") == 0
    assert "sesame" not in err
    assert one.headers[-1]["Authorization"] == "Bearer sesame-open"
    assert "sesame" not in (tmp_path / "out.jsonl.meta.json").read_text()


def test_a_conversation_that_the_server_finds_wrong_is_left_out_and_counted(tmp_path, capfd):
    def behave(handler, body, times):
        if body["messages"][-1]["content"].endswith("3"):
            handler.give({"error": {"message": "this model's context is 4096 tokens"}}, status=400)
            return True
        return False

    prompts, out = questions(tmp_path / "p.jsonl", 20), tmp_path / "out.jsonl"
    with served(behave).up() as url:
        assert run("--prompts", prompts, "--server", url, "--out", out) == 0
    assert len(rows(out)) == 18
    assert "left out: 2 (refused by the server)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--server", "http://127.0.0.1:9"], "cannot be reached"),
        (["--server", "localhost:8000"], "must be an address such as"),
        (["--server", "ftp://localhost"], "must be an address such as"),
        (["--server", "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_KEY"], "must be an environment variable"),
        (["--server", "http://127.0.0.1:9", "--fit", "9"], "needs --target"),
    ],
)
def test_a_server_that_cannot_be_is_told_in_one_sentence(more, told, tmp_path, capfd):
    prompts = questions(tmp_path / "p.jsonl", 1)
    assert run("--prompts", prompts, "--out", tmp_path / "out.jsonl", "--patience", 0.3, *more) == 2
    err = capfd.readouterr().err
    assert told in err
    assert err.strip().count("\n") == 0


def test_killed_commands_and_dying_servers_lose_nothing_and_repeat_nothing_that_is_written(tmp_path, capfd):
    one = served(lambda handler, body, times: time.sleep(0.02))
    prompts, out = questions(tmp_path / "p.jsonl", 120), tmp_path / "out.jsonl"
    with one.up() as url:
        port = int(url.rsplit(":", 1)[1])
        argv = ["--prompts", prompts, "--server", url, "--out", out, "--parallel", 3, "--patience", 0.5]
        command = [sys.executable, "-m", "dflash", "regenerate", *map(str, argv)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=Path(__file__).parent.parent)
        wait_for(lambda: out.exists() and out.read_bytes().count(b"\n") >= 10)
        assert run(*argv) == 2
        assert "is being written by another process" in capfd.readouterr().err
        process.send_signal(signal.SIGKILL)
        process.wait()
    written = out.read_bytes()
    written = written[: written.rfind(b"\n") + 1]
    assert run(*argv, "--server-model", "backwards") == 2  # nobody is there now
    assert "cannot be reached" in capfd.readouterr().err
    assert out.read_bytes() == written

    def die(handler, body, times):
        if one.asked.total() > asked + 30:
            handler.connection.close()
            return True
        return False

    asked, one.behave = one.asked.total(), die
    with one.up(port) as url:
        assert run(*argv) == 2
    assert "what is written is kept" in capfd.readouterr().err
    assert out.read_bytes().startswith(written)
    assert out.read_bytes().count(b"\n") > written.count(b"\n")
    one.behave = lambda handler, body, times: False
    with one.up(port) as url:
        assert run(*argv) == 0
    assert [row["prompt"] for row in rows(out)] == list(range(1, 121))
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.meta.json", "p.jsonl"]


def wait_for(condition, seconds=30.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
