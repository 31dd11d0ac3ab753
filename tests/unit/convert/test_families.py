"""Every family's models come in from transformers and go out to it: the same bits, the same logits, the same text.

Always: variants whose tensors lie differently in files. All of them (a minute):

    pytest tests/unit/convert/test_families.py -m slow
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.convert import check
from megazero.convert.export import finish, write_folder
from megazero.convert.folder import Folder
from megazero.convert.importing import Published, write_checkpoint
from megazero.convert.source import Source
from megazero.train.generate import Sampling, load_text_model, sample_tokens
from tests.family_models import BIAS, VARIANTS, make, perturb, save, transformers
from tests.messages import refused

# Fused rows of two kinds, columns with transposed tensors, two norms of a block and four, a tied head, experts each
# under a name and in one tensor, biases of routers.
CORE = ("falcon-40b", "gpt_neox-no-attention-bias", "gpt2", "olmo2-biases", "gemma3")
CORE += ("mixtral", "granitemoe", "glm4_moe", "gpt_oss")
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
        torch.equal(*(folder.tensor(name).view(-1).view(torch.uint8) for folder in (before, after)))
        for name in before.entries
    )


@torch.no_grad()
def comes_in_and_goes_out(variant: str, root: Path) -> tuple[int, float]:
    """Assert that all is as it was. Return the number of tensors, and by how much logits differ, of both folders."""
    theirs, path, out = round_trip(variant, root)
    before, errors = Folder.open(theirs), []
    assert same_bits(before, Folder.open(out))
    ours, tokens = load_text_model(path), torch.arange(48).reshape(2, 24) * 7 % 101
    wanted = ours.decoder.full_logits(tokens).double()
    said = [list(sample_tokens(ours, prompt, COUNT, Sampling(temperature=0))) for prompt in PROMPTS]
    for folder in (theirs, out):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        logits = model(tokens, use_cache=False).logits.double()
        errors.append(((logits - wanted).norm() / wanted.norm()).item())
        assert errors[-1] < 5e-6
        assert [greedy(model, prompt, ours.tokenizer.info.eod) for prompt in PROMPTS] == said
    assert len({tuple(tokens) for tokens in said}) > 1 and sum(map(len, said)) > 9
    return len(before.entries), max(errors)


def greedy(model: torch.nn.Module, prompt: list[int], eod: int) -> list[int]:
    """What transformers' own generation, with its cache, adds to a prompt before the end of document."""
    options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": eod, "pad_token_id": 0}
    told = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    return [token for token in told if token != eod]


@pytest.mark.parametrize("variant", CORE)
def test_a_variant_comes_in_and_goes_out_as_it_was(variant: str, tmp_path: Path) -> None:
    comes_in_and_goes_out(variant, tmp_path)


def test_routers_in_fp32_stay_so_in_a_folder_of_bf16(tmp_path: Path) -> None:
    """As transformers keeps GLM-4.5's."""
    torch.manual_seed(1)
    model = make("glm4_moe").to(torch.bfloat16)
    perturb(model)
    for mixture in (module for module in model.modules() if hasattr(module, BIAS)):
        mixture.float()
    model.save_pretrained(tmp_path / "hf")
    theirs = Published.open(tmp_path / "hf")
    out = finish(write_folder(Source(write_checkpoint(theirs, tmp_path / "ck")), tmp_path / "out"))
    there = Folder.open(out)
    dtypes = {name: there.tensor(name).dtype for name in there.entries}
    assert {name for name, dtype in dtypes.items() if dtype is torch.float32} == {
        f"model.layers.1.mlp.gate.{kind}" for kind in ("weight", BIAS)
    }
    assert same_bits(theirs.folder, there)


def further(variant: str, root: Path, tied: bool = False) -> Path:
    """A folder whose third layer predicts further tokens, with the names of published ones."""
    folder = save(variant, root, num_hidden_layers=3, tie_word_embeddings=tied)
    shown = json.loads((folder / "config.json").read_text())
    told = {**shown, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(told))
    tensors, layer, h = load_file(folder / "model.safetensors"), "model.layers.2.", shown["hidden_size"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}{name}.weight"] = torch.rand(h)
    tensors[f"{layer}eh_proj.weight"] = torch.randn(h, 2 * h)
    embedding = tensors["model.embed_tokens.weight"]
    tensors[f"{layer}embed_tokens.weight"] = embedding.clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("variant", "tied"), [("glm4_moe", True), ("deepseek_v3", False)])
def test_layers_that_predict_further_tokens_come_in_and_go_out(
    variant: str, tied: bool, tmp_path: Path
) -> None:
    """transformers, which computes the same of the rest, passes over them."""
    theirs = further(variant, tmp_path / "hf", tied)
    path = write_checkpoint(Published.open(theirs), tmp_path / "ck")
    out = finish(write_folder(Source(path), tmp_path / "out"))
    assert same_bits(Folder.open(theirs), Folder.open(out))
    assert Folder.open(out).config["num_nextn_predict_layers"] == 1
    assert all(line.good is not False for line in check.compare_logits(Source(path), Published.open(out)))


def test_layers_that_predict_further_tokens_may_be_set_aside(tmp_path: Path) -> None:
    folder, accept = further("glm4_moe", tmp_path / "hf"), ("num_nextn_predict_layers",)
    file = folder / "model.safetensors"
    left = Published.open(folder, accept)
    assert left.model.mtp_num_layers == 0 and not [name for name in left.names if ".layers.2." in name]
    tensors, again = load_file(file), "model.layers.2.embed_tokens.weight"
    save_file({**tensors, again: torch.zeros_like(tensors[again])}, file)
    with refused(again, "model.embed_tokens.weight"):
        Published.open(folder)
    kept = {name: x for name, x in tensors.items() if ".layers.2." not in name}
    save_file(kept, file)
    with refused("num_nextn_predict_layers = 1", "model.layers.2.enorm.weight", "--accept-field"):
        Published.open(folder)
    assert Published.open(folder, accept).names.keys() == left.names.keys()


def test_tensors_of_further_tokens_with_names_of_their_own_are_left_out_as_well(tmp_path: Path) -> None:
    folder = save("qwen3_next", tmp_path / "hf")
    file = folder / "model.safetensors"
    save_file({**load_file(file), "mtp.fc.weight": torch.zeros(48, 96)}, file)
    with refused("mtp.fc.weight", "--accept-field", "num_nextn_predict_layers"):
        _ = Published.open(folder).names
    assert "mtp.fc.weight" not in Published.open(folder, ("num_nextn_predict_layers",)).names.values()


@pytest.mark.parametrize(
    ("variant", "layers", "compared"),
    [
        *(("smollm3", 5, 4), ("gemma3-linear-capped", 7, 6), ("qwen2-window", 3, 2), ("llama", 3, 2)),
        *(("glm4_moe", 4, 2), ("qwen2_moe-dense-layers", 6, 4)),
    ],
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
    comes_in_and_goes_out(variant, tmp_path)
