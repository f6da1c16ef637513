# The second part of scripts/fresh-host, which sources it: the units of the package in the booted container.

fail() {
	echo "FAILED: $1" >&2
	inside journalctl --no-pager --lines 30 --unit 'pagemesh*' --unit mnt-home.mount >&2 || true
	exit 1
}
# await SECONDS COMMAND...: runs a command until it succeeds.
await() {
	local tries=$(($1 * 5))
	shift
	for _ in $(seq "$tries"); do
		"$@" >/dev/null 2>&1 && return 0
		sleep 0.2
	done
	return 1
}
property() { inside systemctl show --value --property "$2" "$1"; }
is_running() { [ "$(property "$1" SubState)" = running ]; }
has_restarted() { [ "$(property "$1" NRestarts)" -gt "$2" ]; }

check_units() {
	inside systemd-analyze verify --man=no pagemesh-{manager.service,bricks.target} pagemesh-{brick,export,mount}@one.service
	for unit in pagemesh-{manager,brick@one,export@one,mount@one}.service; do
		inside systemd-analyze security --no-pager "$unit" | tail -1
	done
}

# A brick with a pool in memory, which clients map, and two file systems on it: one mounted by a unit, the other by a
# line of /etc/fstab. Neither names the manager: /etc/pagemesh/client.toml does.
start_mounts() {
	inside chown pagemesh /var/lib/memory
	inside sh -c "set -e
		runuser -u pagemesh -- pagemesh pool create /var/lib/memory/two.pool --size 192M
		sed 's/@NAME@/two/; s/@ADDRESS@:7071/127.0.0.1:7072/; s/@MANAGER@/127.0.0.1/; s,/var/lib/pagemesh/two.pool,/var/lib/memory/two.pool,' /usr/share/pagemesh/brick.toml > /etc/pagemesh/brick-two.toml
		mkdir -p /etc/systemd/system/pagemesh-brick@two.service.d /mnt/files /mnt/home
		printf '[Service]\nReadWritePaths=/var/lib/memory\n' > /etc/systemd/system/pagemesh-brick@two.service.d/pool.conf
		systemctl daemon-reload
		systemctl enable --quiet --now pagemesh-brick@two
		for name in files home; do pagemesh fs create \$name --size 32M --copies 1 --class process; done
		sed 's/@NAME@/files/; /^manager/d; /^key/d' /usr/share/pagemesh/mount.toml > /etc/pagemesh/mount-files.toml
		echo 'pagemesh:home /mnt/home pagemesh allow_other,_netdev,nofail,x-systemd.requires=pagemesh-bricks.target,x-systemd.mount-timeout=10min 0 0' >> /etc/fstab
		systemctl daemon-reload
		systemctl enable --quiet --now pagemesh-mount@files
		systemctl start mnt-home.mount" || fail "the mounts do not start"
	inside grep -q ' /mnt/home fuse.pagemesh ' /proc/self/mounts || fail "the line of fstab mounts nothing"
	[ "$(inside stat -c %U /run/pagemesh)" = pagemesh ] || fail "the start of a mount took /run/pagemesh from the user pagemesh"
	inside grep -q two.pool "/proc/$(property pagemesh-mount@files MainPID)/maps" || fail "the mount does not map the pool of its brick"
}

# probe UNIT PROGRAM: runs a program of Perl with the user, the capabilities and the filter of a unit.
probe() {
	local unit=${1}probe dir=/run/systemd/system/${1}probe.service.d
	inside sh -c "mkdir -p $dir && cat > /opt/probe.pl && printf '%s\n' '[Service]' Type=oneshot Restart=no ExecStart= 'ExecStart=/usr/bin/perl -w /opt/probe.pl' > $dir/probe.conf && systemctl daemon-reload" <<<"$2"
	inside systemctl start "$unit" || fail "$unit lacks a right"
	inside sh -c "rm -r $dir && systemctl daemon-reload"
}

# The calls that end or resume a client of root, and that take the socket of a client of another user.
check_rights() {
	inside sh -c 'exec </dev/null >/dev/null 2>&1; sleep 1000 & echo $! > /opt/root.pid; setpriv --reuid 65534 --clear-groups sleep 1000 & echo $! > /opt/other.pid'
	probe pagemesh-brick@ '
		open(my $file, "<", "/opt/root.pid") or die "$!"; chomp(my $pid = <$file>); $pid += 0;
		open(my $maps, "<", "/proc/$pid/maps") or die "maps: $!"; defined(<$maps>) or die "maps are empty";
		kill("CONT", $pid) == 1 or die "kill: $!";
		syscall(101, 0x4206, $pid, 0, 0) == 0 or die "ptrace: $!";'
	probe pagemesh-mount@ '
		open(my $file, "<", "/opt/other.pid") or die "$!"; chomp(my $pid = <$file>); $pid += 0;
		syscall(101, 0x4206, $pid, 0, 0) == 0 or die "ptrace: $!";'
	local take='open(my $file, "<", "/opt/other.pid") or die "$!"; chomp(my $pid = <$file>); $pid += 0;
		(my $process = syscall(434, $pid, 0)) >= 0 or die "pidfd_open: $!";
		syscall(438, $process, 0, 0) >= 0 or die "pidfd_getfd: $!";'
	# The filter of system calls of systemd-nspawn may refuse it to all units.
	if inside systemd-run --quiet --wait perl -e "$take"; then
		probe pagemesh-mount@ "$take"
	else
		echo "this container refuses pidfd_getfd to all units, so it is not checked for the mount"
	fi
	inside sh -c 'kill $(cat /opt/root.pid /opt/other.pid)'
	echo "brick and mount may end and resume clients of other users"
}

restart_units() {
	for unit in pagemesh-{mount@files,export@one,brick@one,manager}; do
		inside systemctl restart "$unit"
		inside systemctl kill --signal=KILL "$unit"
		await 30 has_restarted "$unit" 0 && await 30 is_running "$unit" || fail "$unit does not restart"
		echo "$unit: $(inside systemctl is-active "$unit") after restart and SIGKILL, $(property "$unit" NRestarts) restarts"
	done
}

# A stopped client of root maps the pool of a brick that was killed. The new brick ends it.
check_stopped_client() {
	local mount
	mount=$(property pagemesh-mount@files MainPID)
	inside sh -c "kill -STOP $mount"
	inside systemctl kill --signal=KILL pagemesh-brick@two
	await 60 has_restarted pagemesh-brick@two 0
	await 60 is_running pagemesh-brick@two || fail "a stopped client of root keeps its brick from restarting"
	[ "$(property pagemesh-brick@two NRestarts)" = 1 ] || fail "the brick needed more than one restart"
	await 60 is_running pagemesh-mount@files || fail "the mount that the brick ended does not restart"
	echo "a brick that was killed ends a stopped client of root, and serves again"
}

# After a power cut the manager is away for longer than systemd counts starts by default.
check_power_cut() {
	inside systemctl stop pagemesh-manager
	inside systemctl kill --signal=KILL pagemesh-export@one pagemesh-mount@files
	local before
	before=$(property pagemesh-export@one NRestarts)
	await 120 has_restarted pagemesh-export@one $((before + 6)) || fail "the export gave up: $(property pagemesh-export@one Result)"
	inside systemctl start pagemesh-manager
	for unit in pagemesh-{export@one,mount@files}; do
		await 60 is_running "$unit" || fail "$unit is not back after a power cut"
	done
	echo "export and mount are back after 7 failed starts"
}

# One reboot with data that only the caches of the mounts have, and the order of the end.
check_reboot() {
	inside sh -c 'for it in files home; do dd if=/dev/urandom of=/mnt/$it/data bs=64k count=64 status=none; cp /mnt/$it/data /opt/$it.data; done'
	local begin log
	begin=$(date +%s)
	power_off
	echo "powered off in $(($(date +%s) - begin)) s"
	log=$(journalctl --directory "$(echo "$root"/var/log/journal/*)" --output cat --quiet | grep -E '^(Stopped|Unmounted) (target )?(pagemesh-|mnt-home)')
	line() { grep -n -E -- "$1" <<<"$log" | tail -1 | cut -d : -f 1 || true; }
	local target bricks manager
	target=$(line 'Stopped target pagemesh-bricks')
	manager=$(line 'pagemesh-manager')
	tail -12 <<<"$log"
	for client in 'pagemesh-mount@files' 'pagemesh-export@one' 'mnt-home.mount'; do
		[ "$(line "$client")" -lt "$target" ] || fail_offline "$client ended after the bricks"
	done
	for brick in one two; do
		bricks=$(line "pagemesh-brick@$brick")
		[ "$target" -lt "$bricks" ] && [ "$bricks" -lt "$manager" ] || fail_offline "the brick $brick ended too early or too late"
	done
	boot
	for unit in pagemesh-{manager,brick@one,brick@two,export@one,mount@files}; do
		await 60 is_running "$unit" || fail "$unit is not running after the reboot"
	done
	inside sh -c 'for it in files home; do cmp /mnt/$it/data /opt/$it.data || exit 1; done' || fail "the reboot lost data"
	echo "the reboot ended clients, bricks and the manager in this order, and lost no data"
}
fail_offline() {
	echo "FAILED: $1" >&2
	exit 1
}

check_removal() {
	inside sh -c 'cd /mnt/files && echo $$ > /opt/user.pid && exec sleep 1000 </dev/null >/dev/null 2>&1' &
	local user=$!
	await 10 inside test -s /opt/user.pid
	inside dpkg -r pagemesh >/dev/null 2>"$work/removal.log" && fail "a removal ended a mount in use"
	grep -q 'in use: /mnt/files' "$work/removal.log" || fail "the removal does not name the mount in use: $(cat "$work/removal.log")"
	inside systemctl is-active --quiet pagemesh-brick@two || fail "a refused removal ended a brick"
	inside sh -c 'kill $(cat /opt/user.pid)'
	wait "$user" || true
	inside dpkg -r pagemesh >/dev/null || fail "the removal failed"
	inside grep fuse.pagemesh /proc/self/mounts && fail "the removal left a mount"
	inside sh -c 'grep -x pagemesh /proc/[0-9]*/comm' && fail "the removal left a process"
	inside sh -c 'ls /etc/systemd/system/*.wants/pagemesh-* 2>/dev/null' && fail "the removal left links of units"
	[ -n "$(inside ls /var/lib/pagemesh/one.pool /etc/pagemesh/key)" ] || fail "the removal took data"
	echo "the removal refused a mount in use, then left no mount, no process and no link"
}

check_units
start_mounts
check_rights
restart_units
check_stopped_client
check_power_cut
check_reboot
check_removal
