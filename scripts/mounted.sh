# For scripts that need a mounted file system: a cluster of two bricks in memory, which an exit trap
# removes in every case. Needs root and $pagemesh. Sets $dir, the directory that the trap also
# removes; $dir/mnt is the mount.
[ "$(id -u)" -eq 0 ] || { echo "error: run it as root" >&2; exit 1; }
dir=$(mktemp -d /tmp/pagemesh-mounted.XXXXXX)
export PAGEMESH_MANAGER=http://127.0.0.77:7070 PAGEMESH_KEY=$dir/cluster/key
export XDG_CONFIG_HOME=$dir
started=()
# The command prefix of programs: with EXEC=1 they access the files of the mount directly.
under=()
[ -z "${EXEC:-}" ] || under=("$pagemesh" exec --patience 0 --)

finish() {
  "$pagemesh" umount "$dir/mnt" 2>/dev/null || umount -fl "$dir/mnt" 2>/dev/null || true
  for pid in "${started[@]}"; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" || true
  done
  # The link points to the pools in memory.
  if [ -L "$dir/cluster/pools" ]; then rm -rf "$(readlink "$dir/cluster/pools")"; fi
  rm -rf "$dir"
}
trap finish EXIT
trap 'exit 130' INT TERM

await() {
  until grep -q "^ready.*$2" "$1"; do
    kill -0 "${started[-1]}" || { cat "$1" >&2; exit 1; }
    sleep 0.1
  done
}

# Creates a file system of $2 bytes in pools of $1 bytes.
start_cluster() {
  mkdir "$dir/mnt"
  "$pagemesh" up --dir "$dir/cluster" --bricks 2 --size "$1" --memory \
    --listen 127.0.0.77:7070 >"$dir/up.log" 2>&1 &
  started+=($!)
  await "$dir/up.log" ''
  "$pagemesh" fs create files --size "$2"
}

# Mounts it over the transport $1.
start_mount() {
  : >"$dir/mount.log"
  "$pagemesh" mount files "$dir/mnt" --allow-other --fuse "${FUSE:-auto}" --transport "$1" >"$dir/mount.log" 2>&1 &
  started+=($!)
  await "$dir/mount.log" "$dir/mnt"
}

# Unmounts, and fails if the mount process exited with an error.
end_mount() {
  "$pagemesh" umount "$dir/mnt"
  wait "${started[-1]}"
  unset 'started[-1]'
}
