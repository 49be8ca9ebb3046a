# shellcheck shell=bash disable=SC2034
# Sourced by prolog_slurmctld, epilog_slurmctld and reap: their settings, and what they share. They run beside slurmctld,
# as its user (SlurmUser), with hardly any environment.
# A job has one claim for each node, CLUSTER:JOB.NODE:RESTARTS:SUBMITTED. The tasks' plugin (spank_gpupool.so) names it by
# the first three. SUBMITTED is when the job was submitted, for slurmctld gives a job's number again when it has forgotten
# the job: YYYYMMDDhhmmss in UTC.

export TZ=UTC SLURM_TIME_FORMAT=standard
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin
GPUPOOL=gpupool   # the command
TENANT=none       # whose claims: none where the manager has no tokens; user or account of the job
WAIT=30           # seconds in which all of a job's claims must be there
UNUSED=10m        # a claim ends when no program has used it, and `reap` has not kept it, for so long; at most 1h
SLURM_BOUND=20    # seconds for an answer of slurmctld
GPUPOOL_BOUND=40  # seconds for an answer of the manager, besides WAIT
config=${GPUPOOL_SLURM_CONFIG:-/etc/slurm/gpupool.conf}
if [ -r "$config" ]; then
  set -a  # GPUPOOL_MANAGER, GPUPOOL_TOKEN_FILE, SLURM_CONF
  # shellcheck source=etc/slurm/gpupool.conf
  . "$config"
  set +a
fi

say() {
  printf 'gpupool: %s\n' "$*" >&2
  logger -t gpupool-slurm -- "$*" 2>/dev/null || true
}
# In this script's process group: where Slurm ends the script, what it waits for ends with it.
pool() { timeout --foreground -k 5 "${bound:-$GPUPOOL_BOUND}" "$GPUPOOL" "$@"; }
slurm() { timeout --foreground -k 5 "$SLURM_BOUND" "$@"; }

# submitted JOB: when it was, as above; empty: slurmctld does not say.
submitted() {
  slurm scontrol --oneliner show job "$1" | sed -n "s/^JobId=$1 .* SubmitTime=\([0-9T:-]*\) .*/\1/p" | tr -dc 0-9
}

# claims_of CLUSTER JOB: lines "LEASE JOB.NODE RESTARTS SUBMITTED" of the claims of this cluster's job; JOB may be a regular
# expression. Fails if the manager does not answer. SUBMITTED is "-" in claims of before.
claims_of() {
  local list
  list=$(pool claim list) || return 1
  awk -v cluster="$1" -v job="$2" '{ n = split($2, part, ":") }
    n >= 3 && part[1] == cluster && part[2] ~ "^(" job ")[.]" { print $1, part[2], part[3], (n > 3 ? part[4] : "-") }' <<<"$list"
}
