"""Every family's models come in from transformers and go out to it: the same bits, the same logits, the same text.

Always: variants whose tensors lie differently in files. All of them (a minute):

    pytest tests/unit/convert/test_families.py -m slow
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.convert import check
from megazero.convert.export import finish, write_folder
from megazero.convert.folder import Folder
from megazero.convert.importing import Published, write_checkpoint
from megazero.convert.source import Source
from megazero.train.generate import Sampling, load_text_model, sample_tokens
from tests.family_models import VARIANTS, save, transformers

# Fused rows of two kinds, columns with transposed tensors, two norms of a block and four, a tied head, experts each
# by itself and in one tensor.
CORE = ("falcon-40b", "gpt_neox-no-attention-bias", "gpt2", "olmo2-biases", "gemma3", "mixtral", "granitemoe")
PROMPTS, COUNT = ([5, 3, 7, 7, 90], [40], list(range(60, 72))), 10
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def round_trip(variant: str, root: Path) -> tuple[Path, Path, Path]:
    """Return the folder that transformers saved, the checkpoint and the export."""
    theirs = save(variant, root / "hf")
    path = write_checkpoint(Published.open(theirs), root / "ck")
    return theirs, path, finish(write_folder(Source(path), root / "out"))


def same_bits(before: Folder, after: Folder) -> bool:
    return before.shapes == after.shapes and all(
        torch.equal(before.tensor(name).view(torch.int32), after.tensor(name).view(torch.int32))
        for name in before.entries
    )


@torch.no_grad()
def assert_comes_in_and_goes_out(variant: str, root: Path) -> None:
    theirs, path, out = round_trip(variant, root)
    assert same_bits(Folder.open(theirs), Folder.open(out))
    ours, tokens = load_text_model(path), torch.arange(48).reshape(2, 24) * 7 % 101
    wanted = ours.decoder.full_logits(tokens).double()
    said = [list(sample_tokens(ours, prompt, COUNT, Sampling(temperature=0))) for prompt in PROMPTS]
    for folder in (theirs, out):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        logits = model(tokens, use_cache=False).logits.double()
        error = ((logits - wanted).norm() / wanted.norm()).item()
        print(f"{variant}: logits differ by {error:.1e}")
        assert error < 5e-6
        assert [greedy(model, prompt, ours.tokenizer.info.eod) for prompt in PROMPTS] == said
    assert len({tuple(tokens) for tokens in said}) > 1 and sum(map(len, said)) > 9


def greedy(model: torch.nn.Module, prompt: list[int], eod: int) -> list[int]:
    """What transformers' own generation, with its cache, adds to a prompt before the end of document."""
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": eod, "pad_token_id": 0}
    told = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    return [token for token in told if token != eod]


@pytest.mark.parametrize("variant", CORE)
def test_a_variant_comes_in_and_goes_out_as_it_was(variant: str, tmp_path: Path) -> None:
    assert_comes_in_and_goes_out(variant, tmp_path)


@pytest.mark.parametrize(
    ("variant", "layers", "compared"),
    [("smollm3", 5, 4), ("gemma3-linear-capped", 7, 6), ("qwen2-window", 3, 2), ("llama", 3, 2)],
)
def test_large_models_are_compared_in_the_first_layers_of_each_kind(
    variant: str, layers: int, compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "WHOLE_NUMEL", 0)
    theirs = Published.open(save(variant, tmp_path / "hf", num_hidden_layers=layers))
    lines = list(check.compare_logits(Source(write_checkpoint(theirs, tmp_path / "ck")), theirs))
    assert lines[0].good and f"of the first {compared} of {layers} layers" in lines[0].figure, lines


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in CORE])
def test_every_variant_comes_in_and_goes_out_as_it_was(variant: str, tmp_path: Path) -> None:
    assert_comes_in_and_goes_out(variant, tmp_path)
