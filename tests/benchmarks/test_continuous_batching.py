import json
import sys
from pathlib import Path

import numpy as np
import pytest
from decoders import decoder
from tiny import save_model

from benchmarks.continuous_batching import Comparison, answer_lengths, main


@pytest.mark.parametrize("spread", ["log", "uniform"])
def test_answers_are_as_long_as_said(spread: str) -> None:
    lengths = answer_lengths(64, spread)
    assert (lengths.min(), lengths.max(), len(lengths)) == (16, 256, 64)
    assert len(np.unique(lengths)) > 20


def test_both_ways_give_the_same_tokens_in_the_steps_that_were_worked_out_by_hand() -> None:
    """Two rows, a chunk for two prompts: answers A B C D of 2, 9, 3, 4 tokens.

    static       A and B start in step 1, and B ends in step 9;  C and D start in step 1, and D ends in step 4
    continuous   A and B start in step 1; C, which leaves half of the chunk empty, waits for a step after A and starts in step 4;
                 D likewise in step 8, and ends in step 11
    """
    result = Comparison(decoder(), np.array([2, 9, 3, 4], np.int32), rows=2, prompt_length=3).measure(1)
    assert result["steps"] == {"static": 9 + 4, "continuous": 11}
    assert result["steps_ratio"] == pytest.approx(11 / 13)
    assert (result["tokens"], result["same_tokens"]) == (18, 1.0)
    assert all(speed > 0 for speed in result["tokens_per_second"].values())


def test_batches_must_be_full() -> None:
    with pytest.raises(ValueError, match="3 prompts do not make batches of 2"):
        Comparison(decoder(), np.array([2, 3, 4], np.int32), rows=2, prompt_length=3)


@pytest.mark.slow
def test_sixty_four_prompts_take_at_most_sixty_percent_of_the_steps(tmp_path: Path, monkeypatch, capsys) -> None:
    folder = save_model(tmp_path / "model", max_seq_len=512)
    monkeypatch.setattr(sys, "argv", ["continuous_batching", "--model", str(folder), "--repeats", "1", "--json"])
    main()
    report = json.loads(capsys.readouterr().out)
    assert report["steps_ratio"] <= 0.6
    assert report["prompts"] == 64
    monkeypatch.setattr(sys, "argv", ["continuous_batching", "--model", str(folder), "--repeats", "1"])
    main()
    assert f"{report['steps']['static']}" in capsys.readouterr().out
