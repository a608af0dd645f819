"""What stands in the compiled programs: no copy of the page pool, weights on the left, no copy of the parameters, one compilation.

Pools and models here have sizes found nowhere else, so that an instruction's size tells what it works on.
"""

import math
import re
from typing import Any, NamedTuple

import decoders
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxkv
from jaxkv import PagedKVCache, Sampling
from pallas_kernels.cpu import library

needs_native = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not library.available(), reason="needs the native CPU kernels"
)
NATIVE = pytest.param("cpu", marks=needs_native)
NUM_PAGES, PAGE, ROWS, CHUNK = 1237, 4, 3, 16
POOL = NUM_PAGES * 2 * PAGE * 8  # elements of one layer's k_pages


class Instruction(NamedTuple):
    """One line of a compiled program."""

    computation: str
    opcode: str
    shape: tuple[int, ...]
    operands: str
    line: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)


LINE = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>\S+) = (?P<type>\([^=]*?\)|\w+\[[\d,]*\]\S*) (?P<opcode>[\w-]+)\((?P<operands>.*)$"
)
HEAD = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$|^(?:ENTRY )?%?(?P<bare>[\w.-]+) \{$")


class Program:
    """The instructions of a compiled program, and which of its computations run inside a loop."""

    def __init__(self, compiled: Any):
        self.instructions: list[Instruction] = []
        calls: dict[str, set[str]] = {}
        bodies, fused, current = set(), set(), ""
        for line in re.sub(r"/\*index=\d+\*/", "", compiled.as_text()).splitlines():
            head, found = HEAD.match(line), LINE.match(line)
            if head:
                current = head["name"] or head["bare"]
            elif found:
                dims = re.match(r"\w+\[([\d,]*)\]", found["type"])
                shape = tuple(int(d) for d in dims[1].split(",") if d) if dims else ()
                self.instructions.append(Instruction(current, found["opcode"], shape, found["operands"], line.strip()))
                called = re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", line)
                branches = re.findall(r"branch_computations=\{([^}]*)\}", line)
                called += [name.strip().lstrip("%") for b in branches for name in b.split(",")]
                called += re.findall(r"(?:true|false)_computation=%?([\w.-]+)", line)
                calls.setdefault(current, set()).update(called)
                bodies |= set(re.findall(r"body=%?([\w.-]+)", line))
                if found["opcode"] == "fusion":
                    fused |= set(called)
        self.in_loops, new = set(bodies), bodies
        while new:
            new = {c for name in new for c in calls.get(name, ())} - self.in_loops
            self.in_loops |= new
        self.everything = self.instructions
        # Inside a fusion only the root exists in memory; what stands before it is computed element by element.
        self.instructions = [i for i in self.instructions if i.computation not in fused or i.line.startswith("ROOT")]
        assert len(self.instructions) > 20
        assert bool(bodies) == any(i.opcode == "while" for i in self.instructions)
        assert all(i.computation for i in self.instructions)

    def of(self, *opcodes: str, size: int | None = None, in_loops: bool = False) -> list[str]:
        return [
            i.line
            for i in self.instructions
            if i.opcode in opcodes and (size is None or i.size == size) and (not in_loops or i.computation in self.in_loops)
        ]


TURNS = "attend/(eval_jaxpr/)?while"  # where attention's loop stands in the program; jax 0.12 puts a level between
COPIES = ("copy", "copy-start", "transpose", "convert", "select", "concatenate", "pad", "reverse", "add", "multiply", "slice")


def new_cache(model: jaxkv.Decoder) -> PagedKVCache:
    return PagedKVCache.create(model.config, num_pages=NUM_PAGES, page_size=PAGE, max_seqs=ROWS, max_seq_len=64)


def compiled_generate(model: jaxkv.Decoder, prompts: int = 5, **options: Any) -> Program:
    options = {"max_new_tokens": 8, "page_size": PAGE, "num_pages": NUM_PAGES, "max_seqs": ROWS, **options}
    run = jax.jit(lambda m, p, n, k: jaxkv.generate(m, p, n, key=k, **options))
    tokens = decoders.random_tokens(0, prompts, CHUNK)
    return Program(run.lower(model, tokens, jnp.full(prompts, 9, jnp.int32), jax.random.key(0)).compile())


def compiled_step(model: jaxkv.Decoder, rows: int = ROWS, **options: Any) -> Program:
    """One step with decode rows and two pieces of prompts, as the scheduler takes it: what the layers are made into, for a tenth of
    the time that all of `generate` takes to compile."""
    cache = PagedKVCache.create(model.config, num_pages=NUM_PAGES, page_size=PAGE, max_seqs=rows, max_seq_len=64)
    number = jnp.zeros(rows, jnp.int32)
    inputs = jaxkv.StepInputs(number, number, jnp.zeros((2, CHUNK), jnp.int32), number[:1].repeat(2), number[:1].repeat(2))
    run = jax.jit(lambda m, c, i: jaxkv.step(m, c, i, **options), donate_argnums=1)
    return Program(run.lower(model, cache, inputs).compile())


def compiled_decode_loop(model: jaxkv.Decoder, rows: int, implementation: str | None) -> Program:
    """Greedy tokens of all rows, one step after the other in a loop."""
    cache = PagedKVCache.create(model.config, num_pages=NUM_PAGES, page_size=PAGE, max_seqs=rows, max_seq_len=64)

    def turn(_: jax.Array, state: tuple[PagedKVCache, jax.Array]) -> tuple[PagedKVCache, jax.Array]:
        ones = jnp.ones(rows, jnp.int32)
        logits, cache = jaxkv.extend(model, state[0], state[1][:, None], ones, implementation=implementation)
        return cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    run = jax.jit(lambda c, tokens, count: jax.lax.fori_loop(0, count, turn, (c, tokens)), donate_argnums=0)
    return Program(run.lower(cache, jnp.zeros(rows, jnp.int32), jnp.int32(3)).compile())


def test_the_parser_sees_a_copy_when_there_is_one():
    """What a pool without donation and a pool turned over look like."""

    def copied(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.fori_loop(0, i, lambda j, s: (s[0].at[j].set(1.0), s[0]), (x, x))

    x = jnp.zeros((NUM_PAGES, 2, PAGE, 8))
    program = Program(jax.jit(copied).lower(x, jnp.int32(3)).compile())
    assert program.of(*COPIES, size=POOL, in_loops=True)


class TestPool:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_generate_never_copies_it_in_its_loops(self, dtype: str):
        program = compiled_generate(decoders.decoder(dtype=dtype), num_samples=2, sampling=Sampling(1.0), eos_token_id=3)
        assert program.of("while")
        assert [i for i in program.instructions if i.size == POOL], "the pool is nowhere: the parser is wrong"
        assert program.of(*COPIES, size=POOL, in_loops=True) == []

    @pytest.mark.parametrize("chunk", [1, 5])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_extend_never_copies_a_donated_one(self, chunk: int, dtype: str):
        model = decoders.decoder(dtype=dtype)
        run = jax.jit(jaxkv.extend, donate_argnums=1)
        arguments = (model, new_cache(model), jnp.zeros((ROWS, chunk), jnp.int32), jnp.ones(ROWS, jnp.int32))
        program = Program(run.lower(*arguments).compile())
        assert [i for i in program.instructions if i.size == POOL]
        assert program.of(*COPIES, size=POOL) == []

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_pages_and_queries_are_read_as_whole_rows(self, dtype: str):
        """[pages, page * head_dim], nothing fused behind it: then XLA on CPU copies rows, else number by number."""
        program = compiled_step(decoders.decoder(dtype=dtype), implementation="xla")
        in_turns = [i for i in program.everything if re.search(f"{TURNS}/", i.line)]
        gathers = [i for i in in_turns if i.opcode == "gather" and i.size > POOL // NUM_PAGES]
        widths = set()
        for gather in gathers:
            (root,) = [i for i in program.instructions if i.computation == gather.computation]
            assert root.shape == (gather.shape[0], gather.size // gather.shape[0]), root.line
            widths.add(root.shape[1])
        assert PAGE * 8 in widths
        assert len(widths) <= 3, "pages, and the queries of a decode row and of a piece of a prompt"

    def test_operations_of_the_cache_never_copy_a_donated_one(self):
        cache = new_cache(decoders.decoder())
        n = jnp.ones(ROWS, jnp.int32)
        operations = {
            "allocate": lambda c, n: c.allocate(n, max_tokens=1),
            "free": lambda c, n: c.free(n > 0),
            "fork": lambda c, n: c.fork(n, n),
            "truncate": lambda c, n: c.truncate(n),
        }
        for name, operation in operations.items():
            program = Program(jax.jit(operation, donate_argnums=0).lower(cache, n).compile())
            assert program.of(*COPIES, size=POOL) == [], name


class TestProducts:
    @pytest.mark.parametrize(("deterministic", "dtype"), [(False, "float32"), (True, "bfloat16")])
    def test_the_weight_is_the_left_operand(self, deterministic: bool, dtype: str):
        """On the right, every product on CPU repacks the whole weight. So many rows are products, and tiles of bfloat16."""
        if jax.default_backend() != "cpu":
            pytest.skip("other backends like the weight on the right")
        rows = 70
        sizes = {"hidden_size": 40, "intermediate_size": 56, "head_dim": 16, "rope": jaxkv.Rope(rotary_dim=16)}
        program = compiled_step(decoders.decoder(dtype=dtype, **sizes), rows, deterministic=deterministic, implementation="xla")
        weights = {"qkv": (2 * 4 * 16, 40), "out": (40, 64), "up": (2 * 56, 40), "down": (40, 56), "head": (decoders.VOCAB, 40)}
        shapes = {}
        for line in (i.line for i in program.everything):
            name = re.match(r"(?:ROOT )?%?(\S+) = \w+\[([\d,]*)\]", line)
            if name:
                shapes[name[1]] = tuple(int(d) for d in name[2].split(",") if d)
        seen = set()
        for i in program.everything:
            if i.opcode not in ("dot", "custom-call"):
                continue
            left, right = ([*re.findall(r"%([\w.-]+)", i.operands), "", ""])[:2]
            for name, shape in weights.items():
                assert shapes.get(right) != shape, f"{name} stands on the right: {i.line}"
                if shapes.get(left) == shape:
                    seen.add(name)
        assert seen == set(weights)

    @pytest.mark.parametrize(("hidden", "intermediate"), [(72, 88), (128, 192)])
    @pytest.mark.parametrize(("rows", "implementation"), [(1, "xla"), (2, "xla"), (2, None)])
    def test_few_bfloat16_rows_do_not_convert_the_weights_in_front_of_the_loop(
        self, rows: int, implementation: str | None, hidden: int, intermediate: int
    ):
        """They would be read as float32 at every step then, twice the bytes; and held twice."""
        model = decoders.decoder(hidden_size=hidden, intermediate_size=intermediate, dtype="bfloat16")
        program = compiled_decode_loop(model, rows, implementation)
        weights = {(2 * 4 * 8, hidden), (hidden, 32), (2 * intermediate, hidden), (hidden, intermediate)}
        wide = [i.line for i in program.instructions if i.shape in weights and " f32[" in i.line]
        assert wide == []


class TestAttention:
    def test_where_the_blocks_are_is_worked_out_once_for_all_layers(self):
        def outside(layers: int) -> dict[str, int]:
            program = compiled_step(decoders.decoder(num_layers=layers), implementation="xla")
            here = [i for i in program.everything if "attend/" in i.line and not re.search(f"{TURNS}/", i.line)]
            searches = [i for i in here if i.opcode == "gather" and len(i.shape) == 2]
            return {"sorts": sum(i.opcode == "sort" for i in here), "searches": len(searches)}

        few, more = outside(2), outside(5)
        assert few == more and min(few.values()) > 0

    @pytest.mark.parametrize(("rows", "places"), [(1, 2), (2, 3)])
    @pytest.mark.parametrize("implementation", ["xla", NATIVE])
    def test_the_only_row_does_not_attend_beside_its_own_prompt(self, implementation: str, rows: int, places: int):
        """Steps of decode rows, and steps with a chunk of prompts and, if there may be any, decode rows."""
        program = compiled_generate(decoders.decoder(num_layers=2), max_seqs=rows, implementation=implementation)
        loops = [i for i in program.instructions if i.opcode == "while" and re.search(f'{TURNS}"', i.line)]
        calls = [i for i in program.instructions if i.opcode == "custom-call" and "jaxkv_attention" in i.line]
        assert len(calls if implementation == "cpu" else loops) == 2 * places


@needs_native
def test_instructions_that_a_layer_adds_to_a_step():
    """What a first call takes follows their number. Attention written as loops is two thirds of it: with XLA's forms there are 1,800."""
    few, more = (len(compiled_step(decoders.decoder(num_layers=layers)).everything) for layers in (2, 4))
    assert (more - few) / 2 < 130


class TestParameters:
    def test_a_jitted_rollout_and_training_step_does_not_copy_them(self):
        model = decoders.decoder(hidden_size=40, intermediate_size=56)
        optimizer = optax.sgd(1e-3)

        def iteration(model: jaxkv.Decoder, state: Any, prompts: jax.Array, key: jax.Array) -> tuple[Any, ...]:
            out = jaxkv.generate(model, prompts, max_new_tokens=8, sampling=Sampling(1.0), key=key, max_seqs=ROWS)
            grads = jax.grad(lambda m: -jaxkv.score(m, prompts).mean())(model)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(model, updates), state, out

        arguments = (model, optimizer.init(model), decoders.random_tokens(0, 5, CHUNK), jax.random.key(0))
        program = Program(jax.jit(iteration).lower(*arguments).compile())
        shapes = {x.shape for x in jax.tree.leaves(model) if x.ndim > 1}
        shapes |= {(math.prod(shape[:-1]), shape[-1]) for shape in shapes}
        copies = [i for i in program.instructions if i.opcode in ("copy", "copy-start", "transpose") and i.shape in shapes]
        assert [i.line for i in copies if i.computation in program.in_loops] == []
        assert [i.line for i in copies if "transpose(jvp" not in i.line] == [], "gradients may be turned over, weights not"


class TestCompilations:
    def test_one_per_shape(self, caplog: pytest.LogCaptureFixture):
        model = decoders.decoder()

        def run(seed: int, lengths: list[int], temperature: float, eos: int) -> None:
            prompts = decoders.random_tokens(seed, 4, CHUNK)
            jaxkv.generate(
                model, prompts, jnp.asarray(lengths), max_new_tokens=8, sampling=Sampling(temperature), key=jax.random.key(seed),
                eos_token_id=eos, max_seqs=ROWS,
            )  # fmt: skip

        run(0, [1, 2, 3, 16], 1.0, 5)
        with jax.log_compiles(), caplog.at_level("WARNING"):
            run(1, [16, 9, 1, 1], 0.3, 7)
            compiled = [r.message for r in caplog.records if "Compiling" in r.getMessage()]
        assert compiled == []

    def test_extend_one_per_shape(self, caplog: pytest.LogCaptureFixture):
        model = decoders.decoder()
        cache = new_cache(model)
        _, cache = jaxkv.extend(model, cache, jnp.ones((ROWS, 1), jnp.int32), jnp.ones(ROWS, jnp.int32))
        tokens, counts = (
            decoders.random_tokens(0, ROWS, 1),
            [jnp.asarray(c, jnp.int32) for c in ([1, 0, 1], [0, 0, 0], [1, 1, 1])],
        )
        with jax.log_compiles(), caplog.at_level("WARNING"):
            for count in counts:
                _, cache = jaxkv.extend(model, cache, tokens, count)
            compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
        assert compiled == []
