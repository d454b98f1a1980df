# What .ci/setup and .ci/setup-engines do alike; both source it, from the root of the repository.
#
# Relies on: $venv, the environment that is being made.

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

# quietly WHAT LOG COMMAND...: one line, a dot every 5 s; the log's end follows if the command fails.
quietly() {
  local what=$1 log=build/log/$2 start=$SECONDS dots status=0
  shift 2
  mkdir -p build/log
  printf 'setup: %s ' "$what"
  # Its sleep holds no pipe of ours open, and it ends by itself if this script is killed.
  (while sleep 5 >/dev/null 2>&1 && kill -0 $$; do printf .; done) & dots=$!
  "$@" >"$log" 2>&1 </dev/null || status=$?
  kill "$dots" 2>/dev/null || true
  wait "$dots" 2>/dev/null || true
  if ((status == 0)); then printf ' done in %d s\n' $((SECONDS - start)); return; fi
  printf ' FAILED (exit %d); the end of %s:\n' "$status" "$log"
  tail -n 100 "$log" >&2
  exit 1
}

# if_changed STAMP HASH COMMAND...: a stamp in $venv holds the hash of what something was made from;
# it is written only after the command has succeeded.
if_changed() {
  local stamp=$venv/.kvpool-$1 hash=$2
  shift 2
  [[ $(cat "$stamp" 2>/dev/null) != "$hash" ]] || return 0
  rm -f "$stamp"
  "$@"
  echo "$hash" >"$stamp"
}

hash_of() { find "$@" -type f -not -name '*.pyc' -not -name '*.so' -print0 | sort -z | xargs -0 sha256sum | sha256sum; }

python_is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

venv_fault() {  # why $venv cannot be used; prints nothing when it can
  if [[ ! -e $venv ]]; then echo "there is none"
  elif ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then echo "its Python or pip does not run"
  elif ! python_is_new_enough "$venv/bin/python"; then echo "its Python is older than 3.11"
  elif ! grep -qsF "$PWD" "$venv/bin/activate"; then echo "it was made for another folder"
  fi
}
