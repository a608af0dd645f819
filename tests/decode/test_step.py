"""`extend` and `step` against the model without a cache."""

from typing import Any

import decoders
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import PagedKVCache

CHUNK, SEQS = 17, 5
TOLERANCE = {"atol": 5e-5, "rtol": 2e-5}


def new_cache(model: jaxkv.Decoder, page_size: int = 4, num_pages: int = 60, seqs: int = SEQS, **options: Any) -> PagedKVCache:
    options = {"max_seq_len": 32, **options}
    return PagedKVCache.create(model.config, num_pages=num_pages, page_size=page_size, max_seqs=seqs, **options)


def feed(
    model: jaxkv.Decoder, cache: PagedKVCache, rows: list[list[int]], pieces: list[int], width: int = CHUNK
) -> tuple[list[np.ndarray], PagedKVCache]:
    """Extend every row by its tokens, `pieces` of them per call; logits of every token per row."""
    got: list[list[np.ndarray]] = [[] for _ in rows]
    start = 0
    for piece in pieces:
        tokens, count = np.zeros((len(rows), width), np.int32), np.zeros(len(rows), np.int32)
        for i, row in enumerate(rows):
            part = row[start : start + piece]
            tokens[i, : len(part)], count[i] = part, len(part)
        logits, cache = jaxkv.extend(model, cache, jnp.asarray(tokens), jnp.asarray(count), all_logits=True)
        for i, n in enumerate(count):
            got[i] += list(np.asarray(logits)[i, :n])
            assert not np.asarray(logits)[i, n:].any(), "logits behind a row's tokens are zeros"
        start += piece
    cache.check()
    return [np.asarray(g).reshape(-1, decoders.VOCAB) for g in got], cache


def expected(model: jaxkv.Decoder, rows: list[list[int]], width: int = 32) -> list[np.ndarray]:
    padded = jnp.asarray([row + [0] * (width - len(row)) for row in rows], jnp.int32)
    return [logits[: len(row)] for row, logits in zip(rows, decoders.plain_logits(model, padded), strict=True)]


def assert_rows_close(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, **TOLERANCE)


class TestAgainstTheModelWithoutACache:
    @pytest.mark.parametrize("architecture", sorted(decoders.ARCHITECTURES))
    def test_every_architecture_in_chunks(self, architecture: str):
        model, rows = decoders.decoder(architecture), decoders.random_prompts(0, [27, 0, 1, 8, 25])
        got, _ = feed(model, new_cache(model, page_size=3), rows, [7] * 4, width=7)
        assert_rows_close(got, expected(model, rows))

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_lengths_around_a_page(self, page_size: int):
        model = decoders.decoder()
        rows = decoders.random_prompts(1, [0, 1, page_size - 1, page_size, page_size + 1])
        got, cache = feed(model, new_cache(model, page_size=page_size), rows, [CHUNK])
        assert_rows_close(got, expected(model, rows))
        assert cache.stats().pages_used == sum(-(-len(row) // page_size) for row in rows)

    @pytest.mark.parametrize("pieces", [[17], [1] * 17, [5, 5, 5, 5], [4, 4, 4, 4, 1], [16, 1], [3, 13, 1], [0, 9, 0, 8]])
    def test_any_cut_into_chunks(self, pieces: list[int]):
        model, rows = decoders.decoder(), decoders.random_prompts(2, [17, 16, 5, 4, 3])
        got, _ = feed(model, new_cache(model), rows, pieces)
        assert_rows_close(got, expected(model, rows))

    def test_last_logits_are_the_last_of_all(self):
        model, rows = decoders.decoder(), decoders.random_prompts(2, [17, 16, 5, 4, 0])
        tokens = jnp.asarray([row + [0] * (CHUNK - len(row)) for row in rows], jnp.int32)
        count = jnp.asarray([len(row) for row in rows], jnp.int32)
        last, cache = jaxkv.extend(model, new_cache(model), tokens, count)
        want = expected(model, rows)
        np.testing.assert_allclose(last[:4], [w[-1] for w in want[:4]], **TOLERANCE)
        assert not last[4].any()
        assert cache.lengths.tolist() == [17, 16, 5, 4, 0]

    def test_narrow_cache(self):
        model, rows = decoders.decoder(), decoders.random_prompts(3, [17, 9, 5, 1, 0])
        got, cache = feed(model, new_cache(model, dtype="bfloat16"), rows, [9, 8])
        assert cache.pages[0].k.dtype == jnp.bfloat16
        for g, w in zip(got, expected(model, rows), strict=True):
            np.testing.assert_allclose(g, w, atol=0.1)

    @pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
    def test_quantized_cache(self, dtype: str):
        """Keys and values as narrow numbers with a scale each: near the model's logits, nearer the more bits they keep; and a page
        that is copied on write takes its scales along."""
        model, rows = decoders.decoder(), decoders.random_prompts(3, [10, 9, 5, 1, 0])
        cache = new_cache(model, dtype=dtype)
        assert cache.pages[0].k.dtype == dtype and cache.pages[0].k_scales.shape == cache.pages[0].k.shape[:3]
        got, cache = feed(model, cache, rows, [9, 1])
        wide = {"int8": 0.1, "float8_e4m3fn": 0.5, "float8_e5m2": 1.0}[dtype]
        for g, w in zip(got, expected(model, rows), strict=True):
            np.testing.assert_allclose(g, w, atol=wide)
        tails = decoders.random_prompts(5, [3] * SEQS)
        forked, _ = feed(model, cache.fork(0, 4), [tails[0], [], [], [], tails[4]], [3])
        for i in (0, 4):
            np.testing.assert_allclose(forked[i], expected(model, [rows[0] + tails[i]])[0][10:], atol=wide)

    def test_forks_go_their_own_ways(self):
        model = decoders.decoder()
        prompt, tails = decoders.random_prompts(4, [10])[0], decoders.random_prompts(5, [7] * SEQS)
        _, cache = feed(model, new_cache(model), [prompt, [], [], [], []], [10])
        cache = cache.fork(jnp.zeros(4, jnp.int32), jnp.arange(1, 5))
        got, cache = feed(model, cache, tails, [3, 4])
        assert_rows_close(got, [w[10:] for w in expected(model, [prompt + tail for tail in tails])])
        assert cache.stats().pages_shared == 2

    def test_forgotten_tokens_leave_nothing(self):
        model, rows = decoders.decoder(), decoders.random_prompts(6, [9] * SEQS)
        wrong = decoders.random_prompts(7, [6] * SEQS)
        _, cache = feed(model, new_cache(model), [row[:5] + w for row, w in zip(rows, wrong, strict=True)], [11])
        cache = cache.truncate(jnp.full(SEQS, 5, jnp.int32))
        got, _ = feed(model, cache, [row[5:] for row in rows], [4])
        assert_rows_close(got, [w[5:] for w in expected(model, rows)])


class TestInsideJit:
    def test_a_row_without_pages_is_flagged_and_the_others_go_on(self):
        model, rows = decoders.decoder(), decoders.random_prompts(12, [4, 9, 4, 8, 3])
        tokens = jnp.asarray([row + [0] * (CHUNK - len(row)) for row in rows], jnp.int32)
        count = jnp.asarray([len(row) for row in rows], jnp.int32)
        run = jax.jit(jaxkv.extend, donate_argnums=1)
        logits, cache = run(model, new_cache(model, num_pages=5), tokens, count)  # 1, 3, 1, 2, 1 pages wanted, 4 there
        cache.check()
        assert cache.out_of_pages.tolist() == [False, False, True, True, True]
        for i, want in enumerate(expected(model, rows)):
            if cache.out_of_pages[i]:
                assert int(cache.lengths[i]) == 0
                assert not logits[i].any()
            else:
                np.testing.assert_allclose(logits[i], want[-1], **TOLERANCE)

    def test_under_scan(self):
        model, rows = decoders.decoder(), decoders.random_prompts(13, [17] * SEQS)

        @jax.jit
        def decode(model: jaxkv.Decoder, cache: PagedKVCache, tokens: jax.Array) -> tuple[PagedKVCache, jax.Array]:
            def one(cache: PagedKVCache, column: jax.Array) -> tuple[PagedKVCache, jax.Array]:
                logits, cache = jaxkv.extend(model, cache, column[:, None], jnp.ones(SEQS, jnp.int32))
                return cache, logits

            return jax.lax.scan(one, cache, tokens.T)

        cache, logits = decode(model, new_cache(model), jnp.asarray(rows, jnp.int32))
        cache.check()
        np.testing.assert_allclose(np.swapaxes(logits, 0, 1), np.stack(expected(model, rows)), **TOLERANCE)


class TestStep:
    # The pieces of one step: (row, how many of its tokens), each in room for 6.
    @pytest.mark.parametrize(
        "pieces",
        [
            [(1, 6), (1, 6), (1, 1)],
            [(1, 5), (1, 6), (1, 2), (0, 0)],
            [(1, 6), (3, 6), (1, 6), (3, 2), (1, 1), (2, 0)],
            [(0, 0), (3, 3), (3, 0), (3, 5), (1, 0), (1, 4), (1, 4), (1, 5)],
        ],
    )
    @pytest.mark.parametrize("deterministic", [False, True])
    def test_decode_rows_and_pieces_of_prompts_together(self, pieces: list[tuple[int, int]], deterministic: bool):
        model, width = decoders.decoder("sandwich"), 6
        rows = decoders.random_prompts(14, [9, 17, 6, 8, 3])
        given = [8, 4, 5, 0, 2]  # tokens in the cache before the step
        _, cache = feed(model, new_cache(model), [row[:n] for row, n in zip(rows, given, strict=True)], [CHUNK])
        at, chunk = list(given), []
        for row, count in pieces:
            chunk.append(rows[row][at[row] : at[row] + count] + [7] * (width - count))
            at[row] += count
        in_chunk = [i for i in (1, 3) if at[i] > given[i]]
        inputs = jaxkv.StepInputs(
            decode_tokens=jnp.asarray([row[-1] for row in rows], jnp.int32),
            decode_count=jnp.asarray([1, 0, 1, 0, 1], jnp.int32),
            chunk_tokens=jnp.asarray(chunk, jnp.int32),
            chunk_rows=jnp.asarray([row for row, _ in pieces], jnp.int32),
            chunk_counts=jnp.asarray([count for _, count in pieces], jnp.int32),
        )
        assert inputs.num_tokens().tolist() == [1, at[1] - given[1], 1, at[3] - given[3], 1]
        one_step = jax.jit(jaxkv.step, static_argnames="deterministic")
        logits, cache = one_step(model, cache.allocate(inputs.num_tokens()), inputs, deterministic=deterministic)
        cache.check()
        assert cache.lengths.tolist() == [9, at[1], 6, at[3], 3]
        want = expected(model, rows)
        for i in (0, 2, 4, *in_chunk):
            np.testing.assert_allclose(logits[i], want[i][int(cache.lengths[i]) - 1], **TOLERANCE)

    @pytest.mark.parametrize("chunk", [(0, 1), (1, 4), (3, 2)])
    def test_an_empty_chunk_touches_no_row(self, chunk: tuple[int, int]):
        model, rows = decoders.decoder(), decoders.random_prompts(15, [9, 5, 6, 2, 3])
        _, cache = feed(model, new_cache(model), [row[:-1] for row in rows], [CHUNK])
        zero = jnp.zeros(chunk[0], jnp.int32)
        last = jnp.asarray([row[-1] for row in rows], jnp.int32)
        inputs = jaxkv.StepInputs(last, jnp.ones(SEQS, jnp.int32), jnp.zeros(chunk, jnp.int32), zero, zero)
        logits, cache = jax.jit(jaxkv.step)(model, cache.allocate(inputs.num_tokens()), inputs)
        assert cache.lengths.tolist() == [9, 5, 6, 2, 3]
        np.testing.assert_allclose(logits, [w[-1] for w in expected(model, rows)], **TOLERANCE)

    @pytest.mark.parametrize("seqs", [1, 2])
    def test_a_decode_row_beside_an_empty_piece_takes_its_token(self, seqs: int):
        """Old fault: with one row and pieces the decode row was left out by its shape: its length grew and no token was written."""
        model, rows = decoders.decoder(), decoders.random_prompts(16, [9, 6][:seqs])
        cache = PagedKVCache.create(model.config, num_pages=20, page_size=4, max_seqs=seqs, max_seq_len=32)
        _, cache = feed(model, cache, [row[:-1] for row in rows], [CHUNK])
        last = jnp.asarray([row[-1] for row in rows], jnp.int32)
        none = jnp.zeros(2, jnp.int32)
        inputs = jaxkv.StepInputs(last, jnp.ones(seqs, jnp.int32), jnp.full((2, 5), 7, jnp.int32), none, none)
        logits, cache = jax.jit(jaxkv.step)(model, cache.allocate(inputs.num_tokens()), inputs)
        assert cache.lengths.tolist() == [len(row) for row in rows]
        np.testing.assert_allclose(logits, [w[-1] for w in expected(model, rows)], **TOLERANCE)

    def test_without_decode_rows_only_the_chunk_counts(self):
        model, rows = decoders.decoder(), decoders.random_prompts(17, [9])
        cache = PagedKVCache.create(model.config, num_pages=20, page_size=4, max_seqs=1, max_seq_len=32)
        row, count = jnp.zeros(1, jnp.int32), jnp.asarray([9], jnp.int32)
        inputs = jaxkv.StepInputs(jnp.zeros(0, jnp.int32), jnp.ones(1, jnp.int32), jnp.asarray(rows, jnp.int32), row, count)
        logits, cache = jax.jit(jaxkv.step)(model, cache.allocate(inputs.num_tokens()), inputs)
        assert cache.lengths.tolist() == [9]
        np.testing.assert_allclose(logits, [expected(model, rows)[0][-1]], **TOLERANCE)

    def test_several_decode_tokens_a_row(self):
        """What speculation checks: a row's next token and guesses behind it."""
        model, rows = decoders.decoder(), decoders.random_prompts(18, [9, 5, 6, 8, 3])
        taken = [3, 1, 0, 2, 3]
        _, cache = feed(model, new_cache(model), [row[: len(row) - n] for row, n in zip(rows, taken, strict=True)], [CHUNK])
        tokens = jnp.asarray([(row[len(row) - n :] + [7] * 3)[:3] for row, n in zip(rows, taken, strict=True)], jnp.int32)
        none = jnp.zeros(0, jnp.int32)
        inputs = jaxkv.StepInputs(tokens, jnp.asarray(taken, jnp.int32), none[:, None], none, none)
        logits, cache = jax.jit(jaxkv.step)(model, cache.allocate(inputs.num_tokens()), inputs)
        assert cache.lengths.tolist() == [len(row) for row in rows]
        for i, (n, want) in enumerate(zip(taken, expected(model, rows), strict=True)):
            np.testing.assert_allclose(logits[3 * i : 3 * i + n], want[len(want) - n :], **TOLERANCE)


class TestErrors:
    """Each names the value, comes before any work, and leaves the cache that was given as it was."""

    CASES: dict[str, tuple[Any, Any, str]] = {
        "token too large": ([[61]] + [[0]] * 4, [1] * 5, r"token id 61 is outside the vocabulary \(0 to 60\)"),
        "token negative": ([[0]] * 4 + [[-1]], [1] * 5, "token id -1 is outside the vocabulary"),
        "count too large": ([[0]] * 5, [1, 2, 1, 1, 1], r"num_tokens\[1\] is 2, but must be 0 to 1"),
        "count negative": ([[0]] * 5, [1, 1, 1, 1, -1], r"num_tokens\[4\] is -1"),
        "no chunk": (np.zeros((5, 0)), [0] * 5, r"tokens are empty \(shape \[5, 0\]\)"),
        "rows": ([[0]] * 4, [1] * 4, r"seqs = 5 and chunk > 0, got shape \(4, 1\)"),
        "pool": ([[0] * 12] * 5, [12] * 5, "the new tokens need 15 pages and 9 of 10 are free; .* num_pages >= 17"),
        "table": (
            [[0] * 33] * 5,
            [0, 33, 0, 0, 0],
            "row 1 holds 0 tokens and cannot take 33 more: its block table has room for 32",
        ),
    }

    @pytest.mark.parametrize("case", sorted(CASES))
    def test_bad_input(self, case: str):
        tokens, count, message = self.CASES[case]
        model = decoders.decoder()
        cache = new_cache(model, num_pages=11)
        _, cache = jaxkv.extend(model, cache, jnp.ones((5, 1), jnp.int32), jnp.asarray([1, 0, 0, 0, 0], jnp.int32))
        if case == "table":
            cache = cache.free(jnp.asarray([0]))
        with pytest.raises(ValueError, match=message):
            jaxkv.extend(model, cache, jnp.asarray(tokens, jnp.int32), jnp.asarray(count, jnp.int32))
        logits, cache = jaxkv.extend(model, cache, jnp.ones((5, 1), jnp.int32), jnp.ones(5, jnp.int32))
        assert np.isfinite(logits).all()
        cache.check()

    def test_padding_may_hold_anything(self):
        model = decoders.decoder()
        tokens = jnp.asarray([[3, 99]] + [[-7, 99]] * 4, jnp.int32)
        logits, cache = jaxkv.extend(model, new_cache(model), tokens, jnp.asarray([1, 0, 0, 0, 0], jnp.int32))
        want, _ = jaxkv.extend(model, new_cache(model), tokens[:, :1].clip(0), jnp.asarray([1, 0, 0, 0, 0], jnp.int32))
        np.testing.assert_allclose(logits, want, atol=1e-5)
        cache.check()

    def test_a_row_that_lost_tokens_takes_no_more(self):
        model = decoders.decoder()
        cache = new_cache(model, num_pages=3).allocate(jnp.asarray([4, 9, 0, 0, 0], jnp.int32))
        with pytest.raises(ValueError, match=r"rows \[1\] ran out of pages earlier and have a gap"):
            jaxkv.extend(model, cache, jnp.ones((5, 1), jnp.int32), jnp.asarray([1, 1, 0, 0, 0], jnp.int32))

    def test_positions_the_model_does_not_have(self):
        """Old fault: 10 positions in pages of 16 left room for 16, and a learned position past the end was clamped to the last."""
        model = decoders.decoder("learned", max_seq_len=10)
        cache = new_cache(model, page_size=16, max_seq_len=10)
        with pytest.raises(ValueError, match="row 0 holds 0 tokens and cannot take 11 more"):
            jaxkv.extend(model, cache, jnp.ones((5, 11), jnp.int32), jnp.asarray([11, 0, 0, 0, 0], jnp.int32))


def with_garbage(cache: PagedKVCache, value: float) -> PagedKVCache:
    """Every slot that no token is in holds `value`."""
    live = np.zeros((cache.num_pages, cache.page_size), bool)
    for table, length in zip(np.asarray(cache.block_tables), np.asarray(cache.lengths), strict=True):
        position = np.arange(length)
        live[table[position // cache.page_size], position % cache.page_size] = True
    mask = jnp.asarray(live)[:, None, :, None]
    return cache.with_pages(jax.tree.map(lambda x: jnp.where(mask, x, jnp.asarray(value, x.dtype)), cache.pages))


@pytest.mark.usefixtures("optimized")  # the last one here: from it on
class TestIndependence:
    """Bits."""

    @pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
    def test_what_unused_slots_hold_changes_nothing(self, garbage: float):
        model = decoders.decoder()
        first, second = decoders.random_prompts(8, [17, 9, 5, 1, 16]), decoders.random_prompts(9, [3, 4, 2, 8, 0])
        clean, dirty = new_cache(model), with_garbage(new_cache(model), garbage)
        for rows, pieces in ((first, [9, 8]), (second, [2, 6])):
            want, clean = feed(model, clean, rows, pieces)
            got, dirty = feed(model, with_garbage(dirty, garbage), rows, pieces)
            for g, w in zip(got, want, strict=True):
                np.testing.assert_array_equal(g, w)
            some = jnp.asarray([True, False, True, False, True])  # recycled pages: freed rows leave theirs behind
            clean, dirty = clean.free(some), with_garbage(dirty.free(some), garbage)

    def test_ten_pages_or_ten_thousand(self):
        model, rows = decoders.decoder(), decoders.random_prompts(10, [17, 4, 3, 2, 1])
        few, _ = feed(model, new_cache(model, num_pages=10), rows, [17])
        many, _ = feed(model, new_cache(model, num_pages=10_000), rows, [17])
        for g, w in zip(few, many, strict=True):
            np.testing.assert_array_equal(g, w)

    def test_batch_mates(self):
        model = decoders.decoder()
        rows = decoders.random_prompts(11, [17, 9, 5, 1, 16])
        together, _ = feed(model, new_cache(model), rows, [9, 8])
        for i, row in enumerate(rows):
            alone, _ = feed(model, new_cache(model), [row if j == i else [] for j in range(SEQS)], [9, 8])
            np.testing.assert_array_equal(alone[i], together[i])
