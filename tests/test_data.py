"""A data file to a data set: the account adds up, and the shipped example is what it says it is."""

# --- the whole ----------------------------------------------------------------------------------


def write(path, *conversations):
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in conversations))
    return str(path)


def test_the_summary_adds_up_with_the_rows(tokenizer):
    calls = []
    data = dataset.load(Data(path=str(EXAMPLES)), tokenizer, seed=0, progress=lambda *done: calls.append(done))
    rows = [data.rows.build(at) for at in range(len(data.rows))]
    summary = data.summary
    assert summary["rows"] == len(rows)
    assert summary["tokens"] == sum(row.length for row in rows)
    assert summary["supervised"] == sum(int(row.loss_mask.sum()) for row in rows)
    assert summary["anchors"] == sum(int(eligible_anchors(r.loss_mask, r.document).sum()) for r in rows)
    assert summary["documents"] == sum(int(row.document.max()) + 1 for row in rows)
    assert summary["fill"] == pytest.approx(summary["tokens"] / (256 * len(rows)))
    assert all(eligible_anchors(row.loss_mask, row.document).any() for row in rows)
    assert calls[-1] == (summary["documents"], summary["documents"])
    json.dumps(summary)


def test_the_shipped_data_is_used_whole_in_rows_of_256(tokenizer):
    summary = dataset.load(Data(path=str(EXAMPLES)), tokenizer, seed=0).summary
    assert summary["skipped"] == {}
    assert summary["longest"] <= 256
    assert summary["documents"] == len(EXAMPLES.read_text().splitlines()) >= 200
    assert summary["fill"] > 0.7
    turns = Counter(len(c.messages) for c in chat.read(EXAMPLES)[0])
    assert turns[4] >= 30


def test_what_is_longer_than_a_row_is_skipped_cut_or_refused_as_told(tokenizer, tmp_path):
    path = write(tmp_path / "c.jsonl", say("Hi", "Hello"), say("Hi", "one two three " * 40))
    short = len(tokenizer.apply_chat_template(say("Hi", "Hello"), return_dict=False))
    skip = dataset.load(Data(path=path, row_tokens=64), tokenizer, seed=0).summary
    assert skip["skipped"] == {"longer than a row": 1}
    assert (skip["documents"], skip["cut"], skip["tokens"]) == (1, 0, short)
    assert skip["longest"] > 120
    cut = dataset.load(Data(path=path, row_tokens=64, too_long="cut"), tokenizer, seed=0).summary
    assert (cut["documents"], cut["cut"], cut["tokens"], cut["skipped"]) == (2, 1, short + 64, {})
    with pytest.raises(SettingError, match=r"data\.row_tokens=64: is too short for line 2 of .*c\.jsonl"):
        dataset.load(Data(path=path, row_tokens=64, too_long="error"), tokenizer, seed=0)


def test_a_document_without_place_for_an_anchor_is_counted_and_nothing_left_is_refused(tokenizer, tmp_path):
    lonely = say("Hi", "")  # the end of the turn is the only supervised token
    path = write(tmp_path / "c.jsonl", lonely, say("Hi", "Hello"))
    assert dataset.load(Data(path=path), tokenizer, seed=0).summary["skipped"] == {"no place for an anchor": 1}
    path = write(tmp_path / "d.jsonl", lonely, say("Hi " * 300, "Hello"))
    for too_long, counted in (("skip", "'longer than a row': 1"), ("cut", "'no place for an anchor': 2")):
        with pytest.raises(SettingError, match="holds nothing to train on") as caught:
            dataset.load(Data(path=path, too_long=too_long), tokenizer, seed=0)
        assert counted in str(caught.value)


# --- the shipped example ------------------------------------------------------------------------


def test_the_shipped_responses_are_what_the_target_says(tokenizer, model):
    agreed = total = 0
    for conversation in chat.read(EXAMPLES)[0][:6]:
        (document,) = tokens.documents(conversation.messages, tokenizer)
        with torch.no_grad():
            best = model(torch.from_numpy(document.tokens)[None]).logits[0].argmax(-1).numpy()
        labels = document.loss_mask[1:]
        agreed += int((best[:-1] == document.tokens[1:])[labels].sum())
        total += int(labels.sum())
    assert total > 300
    assert agreed / total > 0.98
