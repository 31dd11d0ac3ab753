"""Megatron's flags: what they mean here, and what is refused."""

import re
import subprocess
import sys

import pytest

from megazero.checkpoint.manifest import Manifest, write_manifest
from megazero.cli.flags import main
from megazero.config import ConfigError, begun, parse
from megazero.config.foreign import deepspeed, megatron
from megazero.config.foreign.explain import differences, explain
from megazero.config.foreign.megatron import COUNTS, flags, kind, other_values
from megazero.config.foreign.table import ACCEPT, MAP, REFUSE, TYPED
from megazero.config.options.fields import show
from megazero.config.options.optimizers import of_schedule
from megazero.config.read.sources import all_switches
from megazero.config.run import REMOVED, all_options
from megazero.ops.exit_conditions import STOP_SIGNALS
from tests import ROOT
from tests.unit.config.command_lines import BASE, base_without, errors, run, write
from tests.unit.config.command_lines import rows as rows_of

WORDS = {"": "", "X": "1", "[X]": "", "[X ...]": "", "X ...": "1"}  # values that stand for each form


def names(wanted):
    return [name for name in flags() if kind(name) == wanted]


def test_the_table_is_well_formed():
    """Every flag's last line says how many values it takes; options and their values exist; no flag is an option."""
    options = {**all_options(), **megatron.derived_options()}
    for rows in (*flags().values(), *other_values().values()):
        for row in rows:
            assert row.kind in (MAP, ACCEPT, REFUSE) and (row.text or row.kind == MAP), row
            assert set(row.options) <= set(options), row
            for name, value in row.options.items():
                choices = options[name].choices
                assert value == TYPED or not choices or {*str(value).split(",")} <= {*choices}, row
        assert len({row.value for row in rows}) == len(rows) or any(row.options for row in rows), rows
    assert all(rows[-1].value in COUNTS for rows in flags().values())
    for name, rows in other_values().items():
        assert not {row.value for row in rows} & {*all_switches()[name].option.choices, *COUNTS}, name
    rows = deepspeed.keys().values()
    assert {row.kind for row in rows} == {MAP, deepspeed.CONVERT, ACCEPT, REFUSE}
    assert all(name in all_options() for row in rows for name in row.options)


def test_every_accepted_flag_is_taken_and_said_in_one_note():
    conditional = ("no-position-embedding", "no-fp8-wgrad", "disable-fp8-wgrad", "is-hybrid-model", "spec")
    typed = {name: flags()[name][0].value for name in names(ACCEPT) if name not in conditional}
    values = {name: WORDS.get(form, form.partition(",")[0]) for name, form in typed.items()}
    config = run(" ".join(f"--{n} {value}" for n, value in values.items()) + " --num-query-groups 2")
    (note,) = (
        note for note in config.notes if note.startswith("these flags of Megatron change nothing here")
    )
    assert all(f"--{name}" in note for name in typed)
    assert config.zero.zero_preset == "zero1" and config.values() == run("--num-query-groups 2").values()


def test_rowwise_scales_have_no_fp8_gradients_of_weights():
    rowwise = "--bf16 --fp8-format e4m3 --fp8-min-size 16 --fp8-recipe rowwise"
    assert run(f"{rowwise} --no-fp8-wgrad").values() == run(rowwise).values()


def test_experts_make_errors_of_flags_that_would_change_results_with_them():
    flags_of_experts = (
        "--moe-loss-coeff 0.01 --moe-expert-capacity-factor 2 --moe-router-force-load-balancing"
    )
    for without in ("", "--num-experts 0", "--num-experts 1"):
        assert run(f"{without} {flags_of_experts}").values() == run("").values()
    found = errors(f"--num-experts 4 --disable-bias-linear {flags_of_experts}")
    assert [line.split(" is Megatron")[0] for line in found] == [
        "--moe-loss-coeff 0.01",
        "--moe-expert-capacity-factor 2",
        "--moe-router-force-load-balancing",
    ]
    same = "--moe-aux-loss-coeff 0 --moe-router-load-balancing-type aux_loss --moe-router-dtype fp32 "
    same += "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-score-function softmax"
    config = run(f"--num-experts 4 --disable-bias-linear {same}")
    assert config.values() == run("--num-experts 4 --disable-bias-linear").values()
    assert config.model.num_experts == 4


def test_flags_are_judged_by_the_model_of_load(tmp_path):
    """A resume that does not repeat the model has its experts, its positions and its key/value heads all the same."""
    model = (
        "--num-experts 4 --swiglu --disable-bias-linear --position-embedding-type rope --num-query-groups 2"
    )
    before = run(model)
    (tmp_path / "iter_0000001").mkdir()
    write_manifest(tmp_path / "iter_0000001", Manifest(1, 0, 1, {}, {}, before.to_dict(), {}))
    assert run(f"--load {tmp_path} --no-position-embedding --group-query-attention").model == before.model
    (line,) = errors(f"--load {tmp_path} --moe-expert-capacity-factor 2")
    assert line.startswith("--moe-expert-capacity-factor 2 is Megatron's flag, not built here")


def test_every_signal_that_stops_a_run_may_be_megatrons_exit_signal():
    for number in STOP_SIGNALS:
        for value in (number.name, number.name.lower(), str(int(number))):
            notes = run(f"--exit-signal {value} --exit-signal-handler").notes
            assert any("--exit-signal " in note and number.name in note for note in notes), notes
        assert number.name in all_options()["exit_signal_handler"].help
    (error,) = errors("--exit-signal SIGUSR2")
    assert all(number.name in error for number in STOP_SIGNALS)


def test_every_refused_flag_says_so_with_the_cure():
    refused = {name: flags()[name][0] for name in names(REFUSE)}
    found = errors(" ".join(f"--{name}" for name in refused))
    assert len(found) == len({row.text for row in refused.values()})  # one line for each cause
    for name, row in refused.items():
        assert any(
            re.search(rf"--{name}\b.*Megatron's flags?, not built here: ", e) and row.text in e for e in found
        )


def test_every_mapped_flag_is_noted_with_what_it_means(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    write_manifest(tmp_path / "iter_0000001", Manifest(1, 0, 1, {}, {}, {}, {}))
    values = {
        "lr-warmup-tokens": "320 --lr-decay-tokens 3200",
        "encoder-num-layers": "4",
        "encoder-seq-length": "32",
    }
    values |= dict.fromkeys(
        ("load-iteration", "override-ckpt-iteration", "load-iters"), f"1 --load {tmp_path}"
    )
    values |= {
        "window-size": "7,0",
        "checkpoint-granularity": "full",
        "activations-checkpoint-granularity": "full",
    }
    values |= {"virtual-pipeline-model-parallel-size": "2 --pipeline-model-parallel-size 2"}
    values |= {
        "padded-vocab-size": "128",
        "train-tokens": "6400",
        "lr-decay-tokens": "3200",
        "min-scale": "1 --fp16",
        **dict.fromkeys(("fp8-e4m3", "fp8-hybrid"), "--bf16 --fp8-min-size 16"),
        "rotary-seq-len-interpolation-factor": "2",
        "yarn-original-max-position-embeddings": "64",
        "original-max-position-embeddings": "64",
        "rope-type": "yarn",
        "sliding-window-size": "64",
    }
    for row in (row for name in names(MAP) for row in flags()[name] if row.kind == MAP):
        value = values.get(row.name, WORDS[row.value]) if row.value in COUNTS else row.value
        line = f"--{row.name} {value} --global-batch-size 16"
        rope = "" if "position_embedding_type" in row.options else " --position-embedding-type rope"
        notes = run(line + rope).notes
        said = [n for n in notes if n.startswith(("Megatron's names", "--")) and f"--{row.name}" in n]
        assert bool(said) == bool(row.options), (line, notes)


# Megatron's words -> options.
MEANS = """
--checkpoint-activations -> recompute_granularity=full
--deepspeed-activation-checkpointing --partition-activations -> recompute_granularity=full
--activations-checkpoint-method uniform -> recompute_granularity=full
--recompute-activations -> recompute_granularity=selective
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 -> recompute_granularity=full
--recompute-method uniform --recompute-num-layers 1 -> recompute_granularity=none
--use-rotary-position-embeddings --no-position-embedding -> position_embedding_type=rope
--position-embedding-type rotary -> position_embedding_type=rope
--position-embedding-type absolute -> position_embedding_type=learned_absolute
--normalization rmsnorm -> normalization=RMSNorm
--layernorm-epsilon 1e-6 -> norm_epsilon=1e-06
--layernorm_epsilon=1e-6 -> norm_epsilon=1e-06
--attention-head-type multiquery -> num_query_groups=1
--attention-head-type multihead -> num_query_groups=4
--tokenizer-type PretrainedFromHF --tokenizer-name-or-path t -> tokenizer_type=HuggingFaceTokenizer
--tokenizer-type TokenizerFromFile --tokenizer-file t -> tokenizer_model=t
--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model t -> tokenizer_type=SentencePieceTokenizer
--glu-activation swiglu -> ffn_hidden_size=256
--glu-activation swiglu --ffn-hidden-size 128 -> ffn_hidden_size=128
--wandb-project-name p --wandb-entity-name e -> wandb_entity=e
--data-parallel-sharding-strategy optim_grads_params --use-megatron-fsdp -> zero_preset=zero3
--rotary-seq-len-interpolation-factor 4 --position-embedding-type rope -> rotary_scaling_factor=4
--position-embedding-type yarn --rotary-scaling-factor 4 -> rotary_scaling=yarn
--position-embedding-type yarn -> rotary_original_max_position=4096
--position-embedding-type yarn --mscale 0.7 -> yarn_mscale=0.7
--position-embedding-type yarn --yarn-original-max-position-embeddings 64 -> rotary_original_max_position=64
--glu-activation geglu -> openai_gelu=off
--glu-activation geglu -> ffn_hidden_size=256
--window-size 7,0 -> sliding_window=8
--window-size (7,0) --sliding-window 8 -> sliding_window=8
--window-size -1,-1 -> sliding_window=unset
--window-size 7,0 --window-attn-skip-freq 2 -> window_attn_skip_freq=2
--window-size 7,0 --window-attn-skip-freq ([1]+[0])*2 -> window_attn_skip_freq=1,0,1,0
--use-rotary-position-embeddings --no-rope-freq [0,1]*2 -> no_rope_freq=0,1,0,1
--position-embedding-type none -> position_embedding_type=rope; no_rope_freq=1
--use-mup --mup-base-hidden-size 8 --mup-embedding-mult 3 -> embedding_multiplier=3
--apply-layernorm-1p -> apply_layernorm_1p=on
--input-embeddings-multiplier 12 -> embedding_multiplier=12
--split '9,1,0' -> split='9,1,0'
--model-family gpt --swiglu --hidden-size 96 -> swiglu=on; ffn_hidden_size=256; add_bias_linear=on
--model-family gpt --swiglu --hidden-size 2048 -> ffn_hidden_size=5440
--model-family gpt --swiglu --ffn-hidden-size 100 -> ffn_hidden_size=100
--swiglu --model-family llama --hidden-size 2048 -> ffn_hidden_size=5504
--model-family gpt --normalization RMSNorm -> normalization=RMSNorm; norm_epsilon=1e-05
--model-family gpt --position-embedding-type rope -> position_embedding_type=rope; rotary_base=10000
--model-family gpt --disable-bias-linear -> add_bias_linear=off; add_qkv_bias=off
--model-family gpt --untie-embeddings-and-output-weights -> untie_embeddings_and_output_weights=on
--model-family gpt --squared-relu -> squared_relu=on; swiglu=off; hidden_dropout=0.1
--model-family gpt -> openai_gelu=on
--model-family gpt --bias-gelu-fusion -> openai_gelu=on
--model-family gpt --disable-bias-linear -> openai_gelu=off
--model-family gpt --disable-bias-linear --openai-gelu -> openai_gelu=on
--model-family gpt --no-bias-gelu-fusion -> openai_gelu=off
--model-family gpt --no-bias-gelu-fusion --openai-gelu -> openai_gelu=on
--model-family gpt --no-bias-gelu-fusion --disable-bias-linear -> openai_gelu=off
--model-family gpt --erf-gelu -> openai_gelu=off
--model-family gpt --no-bias-gelu-fusion --swiglu -> openai_gelu=on
--model-family gpt --disable-bias-linear --squared-relu -> openai_gelu=on
--model-family gpt --disable-bias-linear --swiglu -> openai_gelu=on
--use-flash-attn --attention-backend auto --fp16 --attention-dropout 0 -> attention_backend=flash
--eval-iters -1 --main-grads-dtype bf16 --max-padding-length 8 --patch-tokenizer-type A -> eval_iters=0
--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes [2 2]
    -> hierarchical_context_parallel_sizes=2,2
"""


@pytest.mark.parametrize(("typed", "options"), rows_of(MEANS))
def test_words_of_megatron_are_options(typed, options):
    config = run(typed)
    assert [
        f"{name}={show(config.get(name))}" for name, _, _ in (o.partition("=") for o in options)
    ] == options


def in_tokens(line):
    return parse([*base_without("train_iters"), *line.split()])


def test_of_a_flag_that_stands_twice_the_last_one_counts():
    config = run("--layernorm-epsilon 1e-6 --global-batch-size 16 --layernorm-epsilon 1e-7")
    assert config.model.norm_epsilon == 1e-7
    assert "--layernorm-epsilon 1e-7 replaces the earlier 1e-6" in config.notes
    config = in_tokens("--train-tokens 9600 --global-batch-size 16 --train-tokens 3200")
    assert config.training.train_samples == 112


def test_tokens_are_samples_of_the_sequence_length():
    """At --seq-length 32: 3200 tokens are 100 samples, which batches of 16 reach in iteration 7."""
    config = in_tokens(
        "--train-tokens 3200 --global-batch-size 16 --lr-decay-tokens 1600 --lr-warmup-tokens 320"
    )
    assert config.training.train_samples == 112
    assert (config.optimizer.lr_decay_samples, config.optimizer.lr_warmup_samples) == (50, 10)
    # --train-samples ends earlier or later; without --lr-decay-tokens it is the length of the decay
    config = in_tokens("--train-tokens 3200 --train-samples 100000 --global-batch-size 16")
    assert (config.training.train_samples, config.optimizer.lr_decay_samples) == (112, 100000)
    assert (
        in_tokens("--train-tokens 3200 --train-samples 64 --global-batch-size 16").training.train_samples
        == 64
    )
    # with iterations the same in samples
    config = in_tokens("--train-tokens 3200 --train-iters 5 --lr-warmup-iters 2 --global-batch-size 16")
    assert (config.training.train_samples, config.training.train_iters) == (80, None)
    assert (config.optimizer.lr_warmup_samples, config.optimizer.lr_decay_samples) == (32, 80)
    assert in_tokens("--train-samples 64 --lr-decay-tokens").optimizer.lr_decay_samples is None


def test_tokens_end_a_ramp_up_where_megatron_deepspeed_ends_it():
    from megazero.config.schedule.batch_sizes import BatchSizes, batch_steps

    for tokens in (1, 160, 320, 1900, 3200, 3232, 6400, 9599, 12800):
        line = (
            f"--train-tokens {tokens} --global-batch-size 16 --rampup-batch-size 4 4 60 --micro-batch-size 2"
        )
        samples = in_tokens(line).training.train_samples
        ramp = BatchSizes(batch_steps(None, (4, 4, 60), 16, 32), micro_batch=2, data_parallel=1)
        consumed, iterations = 0, 0  # the loop of Megatron-DeepSpeed
        while consumed * 32 < tokens:
            consumed, iterations = consumed + ramp.batch_size(consumed), iterations + 1
        assert ramp.iterations_within(samples) == iterations


def test_yaml_takes_megatrons_names(tmp_path):
    path = write(
        tmp_path,
        "run.yaml",
        "checkpoint-activations: true\nlayernorm_epsilon: 1e-6\nfp8-hybrid: false\nmanual-gc: true\n",
    )
    config = run(f"--config {path}")
    assert config.training.recompute_granularity == "full" and config.model.norm_epsilon == 1e-6
    assert any("manual-gc" in note for note in config.notes)


def test_the_command_explains_every_flag_and_key(capsys):
    """What it is here, why it changes nothing, or what to do instead; a word that is near is named."""
    for word in (
        *flags(),
        *all_options(),
        *REMOVED,
        *deepspeed.keys(),
        *(row[0].split()[0].strip(",") for row in differences()),
    ):
        assert [*explain(word)], word
    assert main(["--use-distributed-optimizer", "moe-z-loss-coef"]) == 2
    said = capsys.readouterr()
    assert "--zero-preset zero1" in said.out and "nearest: --moe-z-loss-coeff" in said.err
    assert main([]) == 0 and "--eval-interval" in capsys.readouterr().out


def test_help_and_own_flags_do_not_read_the_tables():
    code = (
        "import sys; sys.argv = ['x']; from megazero.config import parse\n"
        "from megazero.config.foreign.table import rows\n"
        f"parse({BASE!r})\ntry: parse(['--help'])\nexcept SystemExit: pass\n"
        "print(rows.cache_info().misses)\nparse([*" + repr(BASE) + ", '--manual-gc'])\n"
        "print(rows.cache_info().misses)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert out.stdout.split()[-2:] == ["0", "1"]


def test_a_resume_tells_what_else_the_flags_change_of_the_update_and_the_loss(tmp_path):
    """Of the optimizer that runs: another one's options change nothing. A family's dropout is as if it were given."""
    before = run("--adam-beta2 0.95 --hidden-dropout 0.1")
    (tmp_path / "iter_0000001").mkdir()
    write_manifest(tmp_path / "iter_0000001", Manifest(1, 0, 1, {}, {}, before.to_dict(), {}))
    load = f"--load {tmp_path} --hidden-dropout 0.1"
    for words, said in (
        ("--adam-beta2 0.95 --lion-beta1 0.5", ""),
        (
            "--adam-beta1 0.8 --z-loss-strength 1e-4",
            "--adam-beta1 0.8 (was 0.9), --adam-beta2 0.999 (was 0.95), --z",
        ),
        ("--adam-beta2 0.95 --hidden-dropout 0", "--hidden-dropout 0 (was 0.1)"),
        ("--optimizer lion --no-load-optim", "--optimizer lion (was adamw)"),
        ("--adam-beta2 0.95 --bf16", "--params-dtype bf16 (was fp32)"),
        ("--adam-beta2 0.95 --seq-length 8", "--seq-length 8 (was 32)"),
        ("--adam-beta2 0.95 --global-batch-size 32", "--global-batch-size 32 (was 16)"),
        ("--adam-beta2 0.95 --eod-mask-loss", "--eod-mask-loss on (was off)"),
        ("--adam-beta2 0.95 --reset-attention-mask", "--reset-attention-mask on (was off)"),
        ("--adam-beta2 0.95 --reset-position-ids", "--reset-position-ids on (was off)"),
        (
            "--adam-beta2 0.95 --micro-batch-size 1 --global-batch-size 16",
            "",
        ),  # no loss is over micro-batches
        ("--finetune", ""),
    ):
        notes = [
            note for note in begun(run(f"{load} {words}")).notes if "the flags decide the update" in note
        ]
        assert len(notes) == bool(said) and all(said in note for note in notes), (words, notes)


def test_a_resume_takes_the_schedule_of_the_flags_or_of_the_checkpoint(tmp_path):
    """Megatron refuses other flags; here they decide, with a note, unless the checkpoint is asked for."""
    before = run("--lr-decay-style cosine --lr-warmup-fraction 0.1 --min-lr 1e-5 --weight-decay 0.3")
    (tmp_path / "iter_0000001").mkdir()
    write_manifest(tmp_path / "iter_0000001", Manifest(1, 0, 1, {}, {}, before.to_dict(), {}))
    same = "--lr-decay-style cosine --lr-warmup-fraction 0.1 --min-lr 1e-5 --weight-decay 0.3"
    assert not any("schedule" in note for note in run(f"{same} --load {tmp_path}").notes)
    longer = [w if w != "10" else "40" for w in BASE]  # --train-iters, and with it the decay
    other = [*longer, *f"--load {tmp_path} --weight-decay 0.1 --clip-grad 2".split()]
    flags = begun(parse(other))
    (note,) = (note for note in flags.notes if "the flags decide the schedule" in note)
    for part in (
        "--min-lr 0 (was 1e-05)",
        "--lr-decay-style linear (was cosine)",
        "--lr-decay-iters 40 (was 10)",
        "--lr-warmup-fraction unset (was 0.1)",
        "--weight-decay 0.1 (was 0.3)",
    ):
        assert part in note, note
    assert "clip-grad" not in note and flags.lr_lengths.decay == 40 and flags.optimizer.weight_decay == 0.1
    (note,) = (note for note in flags.notes if "the flags decide the update" in note)
    assert note.endswith(f"{tmp_path / 'iter_0000001'}: --clip-grad 2 (was 1)")
    for word in ("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"):
        kept = begun(parse([*other, word]))
        named = [name for name in all_options() if of_schedule(name) and name != "lr_decay_iters"]
        assert [kept.get(name) for name in named] == [before.get(name) for name in named]
        assert (
            kept.lr_lengths.decay == 10 and kept.training.train_iters == 40 and kept.optimizer.clip_grad == 2
        )
        assert any("--lr-decay-style cosine" in note and "as in" in note for note in kept.notes)
    with pytest.raises(ConfigError, match="exclude each other"):
        begun(parse([*other, "--use-checkpoint-opt_param-scheduler", "--override-opt_param-scheduler"]))
    samples = [w.replace("--train-iters", "--train-samples") for w in other]
    with pytest.raises(ConfigError, match="has a schedule by --train-iters") as found:
        begun(parse([*samples, "--use-checkpoint-opt_param-scheduler"]))
    assert len(found.value.errors) == 1
