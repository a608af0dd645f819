"""Scripts as vLLM's users write them, with the import changed, and the ways in which `LLM` refuses what it cannot do."""

import numpy as np
import pytest
import transformers
from engine.engines import OPTIONS, generated, greedy, llm, model, prompts
from tiny import save_model

import jaxkv
from jaxkv import LLM, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), chat=True)


@pytest.fixture(scope="module")
def texts(folder):
    """A model with a tokenizer and a chat template."""
    return LLM(str(folder), **{**OPTIONS, "num_gpu_blocks_override": 200})


def test_offline_generation(texts):
    prompts = ["Hello, my name is", "The capital of France is"]
    outputs = texts.generate(prompts, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=5, seed=1), use_tqdm=False)
    for prompt, output in zip(prompts, outputs):
        assert output.prompt == prompt
        assert output.finished
        assert 1 <= len(output.outputs[0].token_ids) <= 5
        assert isinstance(output.outputs[0].text, str)
    assert outputs[0].prompt_token_ids == texts.get_tokenizer()(prompts[0])["input_ids"]


def test_prompts_in_all_forms(texts):
    ids = texts.get_tokenizer()("abc")["input_ids"]
    forms = ["abc", {"prompt": "abc"}, {"prompt_token_ids": ids}, ids, {"prompt": "abc", "prompt_token_ids": ids}]
    outs = texts.generate(forms, greedy(4, ignore_eos=True), use_tqdm=False)
    assert len({tuple(out.outputs[0].token_ids) for out in outs}) == 1
    assert [out.prompt for out in outs] == ["abc", "abc", None, None, "abc"]
    assert texts.generate("abc", greedy(4, ignore_eos=True), use_tqdm=False)[0].outputs == outs[0].outputs
    assert texts.generate(np.asarray(ids), greedy(4, ignore_eos=True), use_tqdm=False)[0].outputs == outs[0].outputs
    assert texts.generate([], greedy(4), use_tqdm=False) == []


def test_parameters_for_each_prompt(texts):
    outs = texts.generate(["a", "b"], [greedy(2, ignore_eos=True), greedy(5, ignore_eos=True)], use_tqdm=False, priority=[1, 0])
    assert [len(out.outputs[0].token_ids) for out in outs] == [2, 5]


def test_chat(texts):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    one = texts.chat(chat, greedy(4), use_tqdm=False)
    assert one[0].prompt == texts.get_tokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    several = texts.chat([chat, chat[1:]], greedy(4), use_tqdm=False)
    assert several[0].outputs == one[0].outputs
    assert several[1].prompt != one[0].prompt
    own = texts.chat(chat, greedy(4), use_tqdm=False, chat_template="{{ messages[-1]['content'] }}!")
    assert own[0].prompt == "Hi!"


def test_samples_logprobs_and_stops(texts):
    out = texts.generate("abc", SamplingParams(n=3, temperature=1.0, logprobs=2, max_tokens=6, seed=2), use_tqdm=False)[0]
    for sample in out.outputs:
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)
        chosen = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids)]
        assert sample.cumulative_logprob == pytest.approx(sum(x.logprob for x in chosen))
        assert all(x.decoded_token is not None for x in chosen)
    free = texts.generate("abc", greedy(8, ignore_eos=True), use_tqdm=False)[0].outputs[0]
    stopped = texts.generate("abc", greedy(8, ignore_eos=True, stop=[free.text[2:4]]), use_tqdm=False)[0].outputs[0]
    assert stopped.text == free.text[: free.text.find(free.text[2:4])]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free.text[2:4])


def test_prefix_caching_and_metrics(texts):
    texts.reset_prefix_cache()
    shared = "a shared beginning of many questions: "
    first = texts.generate(shared + "one", greedy(2), use_tqdm=False)[0]
    second = texts.generate(shared + "two", greedy(2), use_tqdm=False)[0]
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == len(shared) // 4 * 4
    m = second.metrics
    assert m is not None
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert m.time_to_first_token >= 0


def test_defaults_are_vllms_and_the_models(texts, tmp_path):
    assert texts.get_default_sampling_params() == SamplingParams()
    folder = save_model(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}')
    made = LLM(folder, **OPTIONS)
    assert made.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=7, max_tokens=3)
    assert len(made.generate("ab", use_tqdm=False)[0].outputs[0].token_ids) <= 3


def test_a_model_object_is_used_as_it_is():
    made = llm()
    import jax

    assert all(a is b for a, b in zip(made.engine.runner.leaves, jax.tree.leaves(model())))
    given = prompts(3, 9)
    outs = made.generate(given, greedy(5), use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs] == [generated(p, 5)[0] for p in given]


def test_bar_and_repr(texts, capsys):
    texts.generate(["a", "b"], greedy(2), use_tqdm=True)
    assert "Processed prompts" in capsys.readouterr().err
    assert repr(texts).startswith("LLM(llama, Engine(0 sequences waiting, 0 running, 0 of 199 pages held)")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tensor_parallel_size": 2}, ValueError, "tensor_parallel_size=2 is not supported yet"),
        ({"max_model_length": 5}, TypeError, "no argument 'max_model_length'; there are .*max_model_len"),
        ({"max_model_len": 1000}, ValueError, "max_model_len is 1000, but the model allows 128"),
        ({"max_num_batched_tokens": 4}, ValueError, "leaves no room for prompts .* give at least 5"),
        ({"gpu_memory_utilization": 1.5}, ValueError, r"must be in \(0, 1\], got 1.5"),
        ({"kv_cache_dtype": "int3"}, ValueError, "kv_cache_dtype"),
        ({"block_size": 0}, ValueError, "block_size must be an integer >= 1"),
        ({"dtype": "bfloat16"}, ValueError, "dtype is 'bfloat16', but the model given is float32"),
        ({"quantization": "awq"}, TypeError, "no argument 'quantization'"),
    ],
)
def test_arguments_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        llm(**arguments)


def test_arguments_of_vllm_that_change_nothing_are_taken():
    llm(enforce_eager=True, trust_remote_code=True, swap_space=4, disable_log_stats=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"text": "a"}], "a prompt has no field 'text'"),
        ([{}], 'a prompt needs a "prompt" that is a text'),
        ([1.5], "a prompt must be a text"),
        (7, "prompts must be a text"),
        ([["a"]], "a prompt must be a text"),
    ],
)
def test_prompts_that_are_refused(texts, given, message):
    with pytest.raises(ValueError, match=message):
        texts.generate(given, greedy(2), use_tqdm=False)
    assert not texts.engine.has_unfinished()


def test_chats_that_are_refused(texts):
    for wrong in ([], "hello", [[]], [["a"]]):
        with pytest.raises(ValueError, match=r"must be \[\{"):
            texts.chat(wrong, greedy(2), use_tqdm=False)
    with pytest.raises(ValueError, match="no chat template"):
        llm().chat([{"role": "user", "content": "x"}], greedy(2))
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        texts.generate(["a", "b", "c"], [greedy(1)] * 2, use_tqdm=False)


def test_the_pool_follows_from_memory(monkeypatch, caplog):
    import logging

    from jaxkv.engine import memory

    with caplog.at_level(logging.INFO, "jaxkv"):
        made = llm(num_gpu_blocks_override=None)
    assert made.engine.runner.sizes.num_pages == 4 * 32 + 1  # all that four sequences of 128 tokens can use
    assert "128 pages of 4 tokens" in caplog.text
    assert "4.0 sequences of 128 tokens" in caplog.text
    each = 2 * 2 * 2 * 8 * 4 * 4  # k and v, layers, heads, head_dim, bytes, tokens
    monkeypatch.setattr(memory, "available_memory", lambda: 20 * each)
    assert llm(num_gpu_blocks_override=None, gpu_memory_utilization=0.5).engine.runner.sizes.num_pages == 10
    monkeypatch.setattr(memory, "available_memory", lambda: each)
    with pytest.raises(ValueError, match=f"no room for pages: one of 4 tokens takes {each:,} bytes"):
        llm(num_gpu_blocks_override=None)


def test_available_memory_is_that_of_the_machine_or_the_container(monkeypatch):
    from jaxkv.engine import memory

    assert memory.available_memory() > 2**20
    monkeypatch.setattr(memory, "_free_of_containers", lambda: [12345])
    assert memory.available_memory() == 12345


@pytest.mark.torch
def test_answers_are_those_of_transformers(folder, texts):
    import torch

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = texts.get_tokenizer()("The quick brown fox")["input_ids"]
    want = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert texts.generate({"prompt_token_ids": ids}, greedy(12), use_tqdm=False)[0].outputs[0].token_ids == want


def test_both_python_and_the_package_name_it():
    assert jaxkv.LLM is LLM
