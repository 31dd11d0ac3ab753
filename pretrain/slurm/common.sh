# What the batch scripts beside this one share. sbatch runs a copy of a script, so they look for this file, and for
# megazero's programs, in the folder that they are submitted from: the checkout. sbatch hands on the environment that it
# is called in, so a virtual environment is activated before. LAUNCH stands before python, on each node: a container's
# "apptainer exec --nv IMAGE". No variable has to be set.
STOPPED=75 RANK_LOST=76                   # exit statuses after which the same command goes on (docs/guide/slurm.md)
IN_USE=73 STORAGE=74                      # another job writes into RUN; a disk takes nothing
MOST_RESTARTS=${MOST_RESTARTS:-3}         # in a row, without a new checkpoint in between
if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "this is a batch script: sbatch --nodes=N $0 FLAGS of pretrain_gpt.py" >&2
    return 2
fi
# This job, or this task of an array. By number alone, SLURM takes the task that has the array's number for all of it.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
# Checkpoints and logs, on a disk that every node sees. Each job, and each task of a job array, has its own.
RUN=${RUN:-runs/$SLURM_JOB_NAME-$job}
mkdir -p "$RUN"
rm -rf "$RUN/.end-$SLURM_JOB_ID".*        # of an earlier start of this job
echo "$(date -Is) job $job: RUN=$RUN"
series=$job                               # whose restarts are counted together
restarts=0
# What every run is given besides its own flags: before them what they may replace, behind them what they may not.
FIRST=(--load "$RUN")
ALWAYS=(--save "$RUN" --log-dir "$RUN/logs" --exit-signal-handler)
# One that is lost takes the step with it, and none is waited for.
SRUN=(srun --kill-on-bad-exit=1 --wait=60)
# Threads that spin on a node's cores take them from the ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# --signal=B:USR1 and "scancel --batch" signal this shell alone: it notes that it was told to stop, and hands the signal
# to the step that it waits for, if there is one. srun hands it to every rank.
step="" told=""
hear() {
    told=$1
    [ -z "$step" ] || kill -"$1" "$step" 2>/dev/null
}
for name in USR1 TERM; do trap "hear $name" $name; done

# Run a command until it ends, and leave its exit status in $status, and the nodes that its health check named in $named.
# Once told to stop, nothing is run.
run() {
    status=$STOPPED named="" said=""
    [ -z "$told" ] || return
    # Ranks say here how they end: no earlier start and no other job has this folder.
    export MEGAZERO_END_FOLDER
    MEGAZERO_END_FOLDER=$(mktemp -d "$RUN/.end-$SLURM_JOB_ID.XXXXXX")
    "$@" &
    step=$!
    [ -z "$told" ] || kill -"$told" $step  # it came before there was a step
    while kill -0 $step 2>/dev/null; do wait $step; done
    wait $step
    status=$?
    step=""
    # The run's own word, where it had time to write it: a launcher's may be of the ranks that it ended. Ranks that
    # were all killed have said nothing.
    if [ -s "$MEGAZERO_END_FOLDER/exit_status" ]; then
        status=$(<"$MEGAZERO_END_FOLDER/exit_status") said=1
    elif [ "$status" -gt 128 ]; then
        status=$RANK_LOST
    fi
    named=$(cat "$MEGAZERO_END_FOLDER/bad_nodes" 2>/dev/null)
    [ -z "$MEGAZERO_END_FOLDER" ] || rm -rf "$MEGAZERO_END_FOLDER"
}

newest() { ls -v -- "$RUN" 2>/dev/null | grep -xE 'iter_[0-9]+' | tail -1; }

# The nodes that the health check of the last start named, one a line.
bad_nodes() { [ -z "$named" ] || echo "$named"; }

# Say what becomes of the run, and note it among its own events: queue (its job goes back there), chain (another job
# goes on) or end. Those of a folder that another job holds are not this job's.
decide() {
    local lease
    say "${@:2}"
    lease=$(tr -d '[:space:]' < "$RUN/logs/lease")  # JSON, however it is spaced
    [[ $lease == *'"released":""'* && $lease != *"\"job\":\"$job\""* ]] && return
    mkdir -p "$RUN/logs"
    printf '{"event": "job", "time": "%s", "job_id": "%s", "status": %d, "then": "%s", "why": "%s"}\n' \
        "$(date -u +%FT%T.%3N+00:00)" "$job" "$status" "$1" "${*:2}" >> "$RUN/logs/events.jsonl"
} 2>/dev/null

say() { echo "$(date -Is) job $job: exit status $status, newest checkpoint $(newest): $*"; }

# Whether to start the same command again: it was told to stop or lost a rank, and checkpoints do get newer. The file
# holds the row of starts that got none, and the jobs that it is of; any other end ends the row. A restart that cannot
# be counted would not be the last: it is not made.
goes_on() {
    local count="" before=- of="" newest why="it is not started again"
    [ "$status" != $IN_USE ] || return 1  # the files below are another job's
    newest=$(newest)
    [ -f "$RUN/restarts" ] && read -r count before of < "$RUN/restarts"
    # Arithmetic runs the commands in what it is given: only a number is.
    [[ $count =~ ^[0-9]{1,9}$ && $of == "$series" && ${newest:-none} == "$before" ]] &&
        restarts=$((10#$count + 1)) || restarts=0
    if [ "$status" = $STOPPED ] || [ "$status" = $RANK_LOST ]; then
        # echo would not notice a disk that takes the bytes and loses them at close.
        if ! echo "$restarts ${newest:-none} $series" | dd of="$RUN/restarts" conv=fsync status=none; then
            status=$STORAGE why="$RUN takes no file, so restarts cannot be counted: not again"
        elif [ "$restarts" -lt "$MOST_RESTARTS" ]; then
            return 0
        else
            why="$restarts restarts without a new checkpoint: not again"
        fi
    fi
    rm -f "$RUN/restarts"
    [ "$status" = 0 ] || decide end "$why"
    return 1
}

# Put the job back into the queue, without nodes named bad by this start, or by one of its row (see goes_on). Those that
# the user excludes stay so. SLURM ends this shell meanwhile.
requeue() {
    local record excluded of="" users="" bad only=()
    record=$(patiently scontrol show job "$job")
    # SLURM would requeue a job that it is about to end, too: one that was cancelled has to stay so. It may be cancelled
    # between these two calls, so SLURM is to look again; a job at its time limit is over for it.
    if [[ $record == *JobState=RUNNING* ]]; then
        only=(incomplete)
    elif [[ $record != *Reason=TimeLimit* ]]; then
        decide end "not again: it was cancelled, or SLURM itself requeues it"
        return
    fi
    excluded=$(sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p' <<< "$record")
    [ -f "$RUN/excluded" ] && read -r of users < "$RUN/excluded"
    if [ "$of" != "$job" ]; then           # nothing was added yet
        users=$excluded
        echo "$job $users" > "$RUN/excluded"
    fi
    bad=$(bad_nodes | paste -sd,)
    [ "$restarts" -eq 0 ] || users=$excluded
    bad+=${users:+${bad:+,}$users}
    decide queue "back into the queue${bad:+, without $bad}"
    scontrol requeue "${only[@]}" "$job" || return
    # Only a job that waits takes another list.
    [ "$bad" = "$excluded" ] || scontrol update JobId="$job" ExcNodeList="$bad"
    sleep 60
}

# Run a command again until it succeeds: the controller may be away for some minutes.
patiently() {
    local left
    for left in {29..0}; do
        "$@" && return
        [ "$left" = 0 ] || sleep 10
    done
    return 1
}
