# What the batch scripts beside this one share. sbatch runs a copy of a script, so they look for this file, and for
# megazero's programs, in the folder that they are submitted from: the checkout.
STOPPED=75 RANK_LOST=76                   # exit statuses after which the same command goes on (docs/slurm.md)
MOST_RESTARTS=${MOST_RESTARTS:-3}         # in a row, without a new checkpoint in between
# Checkpoints and logs, on a disk that every node sees. Each task of a job array has its own.
RUN=${RUN:-runs/$SLURM_JOB_NAME${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}}
mkdir -p "$RUN"
# What every run is given besides its own flags.
ALWAYS=(--save "$RUN" --load "$RUN" --log-dir "$RUN/logs" --exit-signal-handler)
# One that is lost takes the step with it, and none is waited for.
SRUN=(srun --kill-on-bad-exit=1 --wait=60)
# Threads that spin on a node's cores take them from the ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Run a command until it ends, and leave its exit status in $status.
run() {
    rm -f "$RUN/logs/exit_status" "$RUN/logs/bad_nodes"  # of an earlier start
    "$@" &
    local step=$! name
    # --signal=B:USR1 and "scancel --batch" signal this shell alone: hand it on. srun hands it to every rank.
    for name in USR1 TERM; do trap "kill -$name $step 2>/dev/null" $name; done
    while kill -0 $step 2>/dev/null; do wait $step; done
    wait $step
    status=$?
    # The run's own word, where it had time to write it: a launcher's may be of the ranks that it ended. Ranks that
    # were all killed have said nothing.
    if [ -s "$RUN/logs/exit_status" ]; then
        status=$(<"$RUN/logs/exit_status")
    elif [ "$status" -gt 128 ]; then
        status=$RANK_LOST
    fi
}

newest() { ls -d "$RUN"/iter_* 2>/dev/null | tail -1; }

# The nodes that the health check of the last start named, one a line.
bad_nodes() { cat "$RUN/logs/bad_nodes" 2>/dev/null; }

say() { echo "$(date -Is) job $SLURM_JOB_ID: exit status $status, newest checkpoint $(newest): $*"; }

# Whether to start the same command again: it was told to stop or lost a rank, and checkpoints do get newer.
goes_on() {
    local restarts=0 before=none newest
    newest=$(newest)
    [ -f "$RUN/restarts" ] && read -r restarts before < "$RUN/restarts"
    [ "${newest:-none}" = "$before" ] && restarts=$((restarts + 1)) || restarts=0
    echo "$restarts ${newest:-none}" > "$RUN/restarts"
    [ "$status" = $STOPPED ] || [ "$status" = $RANK_LOST ] || return 1
    [ "$restarts" -lt "$MOST_RESTARTS" ] && return 0
    say "$restarts restarts without a new checkpoint: not again"
    return 1
}

# Put the job back into the queue, without nodes named bad. SLURM ends this shell meanwhile.
requeue() {
    local job bad before
    job=$(scontrol show job "$SLURM_JOB_ID")
    # SLURM would requeue a job that it is about to end, too: one that was cancelled has to stay so.
    if [[ $job != *JobState=RUNNING* && $job != *Reason=TimeLimit* ]]; then
        say "not again: it was cancelled, or SLURM itself requeues it"
        return
    fi
    bad=$(bad_nodes | paste -sd,)
    say "back into the queue${bad:+, without $bad}"
    scontrol requeue "$SLURM_JOB_ID" || return
    if [ -n "$bad" ]; then  # only a job that waits takes another list
        before=$(sed -n 's/.*ExcNodeList=\([^ (]*\).*/,\1/p' <<< "$job")
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$bad${before%,}"
    fi
    sleep 60
}
