"""Measurements, and the pages of docs that tell them. Start them from the root of the repository:

    python benchmarks/compare_commits.py --against main    # this tree's bits beside another commit's
    python benchmarks/step_time.py --against main          # its step times; without --against, beside torch's
    python -m benchmarks.links.comparison --help           # those in folders

A program prints the table that stands on its page. What each folder measures, and its pages:

    features    the engine on a device's host; the loss in chunks
                -> decisions, training
    links       step times and bytes on slow links beside FSDP2, HSDP, DDP, DeepSpeed and torch's pipelining; what
                context parallelism sends; what launches that meet lose where others die
                -> comparison, pipeline, slow-links, fsdp2, experts, parallelism
    loss        what quantised messages, outer steps and Muon do to the loss; rounding of a trained model
                -> loss, training
    patches     loss under megatron_core_patch and fsdp2_patch; step times under the first
                -> megatron-patch, fsdp2
    pipeline    bubbles and bytes of pipelines
                -> pipeline
    planning    the planner beside published runs, and what it says of some models
                -> published
    gpu_report  the pieces of `make gpu-report`; what the kernels compile to
                -> gpu, kernels

What they share lies beside the folders: harness.py (command lines, ranks, turns, statistics, tables), steps.py (one
decoder and its training step, by megazero and by plain torch), lone_rank.py and rank_threads.py (ranks of a cluster
without a cluster), shared_card.py (ranks of one card), commit_trees.py and tree_ranks.py (runs of another commit).
"""
