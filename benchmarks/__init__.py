"""Measurements, and the pages of docs that they feed. Start them from the root of the repository:

    python benchmarks/compare_commits.py --against main    # this tree's bits beside another commit's
    python benchmarks/step_time.py --against main          # its step times; without --against, beside torch's
    python -m benchmarks.links.comparison --help           # those in folders

What each folder measures, and its pages:

    features    what one feature costs: asynchronous saves, compiled layers, masks, the loss in chunks, conversion,
                heartbeats, the engine on a device's host, the Hadamard transform; and whether lm-eval agrees with an
                export
                -> training, checkpoints, decisions, hugging-face, slurm
    links       step times and bytes on slow links beside FSDP2, HSDP, DDP and DeepSpeed; two hops against one;
                Muon's updates; what delays cost
                -> comparison, slow-links, fsdp2, decisions
    loss        what quantised messages, outer steps and Muon do to the loss; rounding errors
                -> loss, loss_at_size, rounding, training
    patches     loss, step times and host time under megatron_core_patch and fsdp2_patch, also of torchtitan's experts
                -> megatron-patch, fsdp2
    pipeline    bubbles, bytes and step times of pipelines; a backward split in two
                -> pipeline
    planning    the planner beside published runs, and what it says of some models
                -> published
    gpu_report  the pieces of `make gpu-report`; what the kernels compile to
                -> gpu, kernels

What they share lies beside the folders: harness.py (command lines, ranks, turns, statistics, pages), steps.py (one
decoder and its training step, by megazero and by plain torch), lone_rank.py and rank_threads.py (ranks of a cluster
without a cluster), commit_trees.py and tree_ranks.py (runs of another commit).
"""
