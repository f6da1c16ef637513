# `make test` and `make demo` need no other set-up on Debian or Ubuntu with Rust: both install
# missing packages.
CARGO ?= cargo

.PHONY: all install console console-real console-ready test quick check deny nextest setup demo bench sim storm kills direct-clients direct-client-histories guests guest-lives natives crowd databases mapped flips fsx doors pjdfstest programs docs dist deb image fresh-host bench-api metrics-check api-check
all:
	$(CARGO) build --release --locked -p pagemesh -p pagemesh-preload

# Installs the command, the library of the direct path, and the helpers of mount(8) and umount(8)
# for /etc/fstab lines of type pagemesh. Run as root after `make`: it builds nothing, because root may
# have no Rust. DESTDIR is for packages.
PREFIX ?= /usr/local
SBIN ?= /sbin
install:
	@for built in pagemesh libpagemesh_preload.so; do \
		test -f target/release/$$built || { echo "target/release/$$built is missing: run make first, without root" >&2; exit 1; }; \
	done
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(SBIN)
	install target/release/pagemesh $(DESTDIR)$(PREFIX)/bin/
	install -m 644 target/release/libpagemesh_preload.so $(DESTDIR)$(PREFIX)/lib/
	ln -sf $(PREFIX)/bin/pagemesh $(DESTDIR)$(SBIN)/mount.pagemesh
	ln -sf $(PREFIX)/bin/pagemesh $(DESTDIR)$(SBIN)/mount.fuse.pagemesh
	ln -sf $(PREFIX)/bin/pagemesh $(DESTDIR)$(SBIN)/umount.fuse.pagemesh

# The programs and libraries of packages, without symbols, and their tree of files.
dist:
	$(CARGO) build --profile dist --locked -p pagemesh -p pagemesh-preload
	$(CARGO) rustc --profile dist --locked -p pagemesh-native --lib --crate-type cdylib -- -C link-arg=-Wl,-soname,libpagemesh.so.0
	@scripts/stage target/dist target/package/root

# A package of Debian, in target/package.
deb: dist
	@scripts/deb target/package/root target/package

# An OCI image in target/package, made without docker. To load it: docker load (from version 25 on) or podman load -i
# target/package/pagemesh-oci.tar, or skopeo copy oci-archive:target/package/pagemesh-oci.tar DESTINATION.
image: dist
	@scripts/image target/package/root target/package/pagemesh-oci.tar
# The package on a fresh Debian with systemd, from `dpkg -i` to verified I/O, and each unit restarted and
# killed. Needs root.
fresh-host: deb
	@command -v mmdebstrap systemd-nspawn >/dev/null || apt-get install -y mmdebstrap systemd-container
	@scripts/fresh-host target/package/pagemesh_*_amd64.deb --units

# Builds the web console into crates/console, and tests it in a browser over a mock of the manager. Needs
# Node.js 20.19 or later and Chromium (CHROMIUM=PATH, by default /usr/bin/chromium). Cargo needs neither: the built
# files are committed.
console:
	cd console && npm ci && npm run check && npm run unit && npm run build && npm run pages

# Uses the console that a trial cluster serves, in Chromium: volumes, copies, a scrub, an event, a token. For another
# build: scripts/console-real target/debug/pagemesh
console-real: all
	cd console && npm ci
	@scripts/console-real target/release/pagemesh

# The time until the console shows its first row, over a manager with 4096 volumes and 100 simulated bricks. Needs the
# same.
console-ready:
	cd console && npm ci
	$(CARGO) test --release --locked -p pagemesh-manage --test it --no-run
	@scripts/console-ready

# A failure does not end the run; the summary has the command that reruns each.
test: setup check deny nextest
	$(CARGO) xtask test

# The inner loop: format, lints, rules of the tree, and the unit tests of crates that differ from
# the commit SINCE.
SINCE ?= main
quick: nextest
	$(CARGO) xtask quick --since $(SINCE)

# The library of pagemesh-native has the name of the command, so the pages of both have one directory:
# written at the same time, one run removes the other's files.
DOC = RUSTDOCFLAGS="-D rustdoc::broken_intra_doc_links" $(CARGO) doc --quiet --no-deps --document-private-items --locked
check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(DOC) --workspace --exclude pagemesh-native
	$(DOC) -p pagemesh-native

# The runner of the tests. Its own updates from the network are left out.
nextest:
	@command -v cargo-nextest >/dev/null || \
	$(CARGO) install --locked --no-default-features --features default-no-update cargo-nextest

# Without advisories: no package registry offers their database.
deny:
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny --all-features check bans licenses sources

# The book, into target/book, after a check of its links and of its generated pages (cargo xtask
# reference writes these).
docs:
	@command -v mdbook >/dev/null || $(CARGO) install --locked mdbook
	$(CARGO) test --quiet --locked -p xtask --test tidy --test limits -- links page
	$(CARGO) test --quiet --locked -p pagemesh --bin pagemesh reference
	mdbook build docs

# Packages of the clients that tests, the demo and the benchmarks use.
setup:
	@scripts/setup

# The alert rules of contrib, their tests, and the metrics of running processes, if promtool is there.
metrics-check: all
	@scripts/metrics-check target/release/pagemesh

# The answers of a running manager against its OpenAPI document, with schemathesis from PyPI: make api-check
# EXAMPLES=200 SEED=7.
EXAMPLES ?= 20
api-check: all
	@EXAMPLES=$(EXAMPLES) SEED=$(SEED) scripts/api-check target/release/pagemesh

demo: setup all
	@scripts/demo target/release/pagemesh

# Histories of the cluster simulation: make sim SEEDS=50000. One seed alone, with its history: make sim
# SEED=7. Other kinds: KIND=--files, KIND=--direct-clients, KIND=--snapshots.
SEEDS ?= 2000
KIND ?=
# SEED has a default for other targets, so only a value from outside of this file selects a seed.
sim:
	$(CARGO) xtask sim $(if $(filter command environment,$(origin SEED)),--seed $(SEED),--seeds $(SEEDS)) $(KIND)

# Kills, stops and disconnects bricks, manager and clients under a checked load, several at once, in
# an order from the seed: make storm ROUNDS=100 SEED=7. Disconnecting needs root.
storm: ROUNDS = 100
SEED ?= 1
storm: setup
	PAGEMESH_STORM_ROUNDS=$(ROUNDS) PAGEMESH_STORM_SEED=$(SEED) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture faults::storm::

# Kills clients under load, this many times per layout: make kills ROUNDS=50.
ROUNDS ?= 50
kills: setup
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture client_is_killed

# Kills and stops direct clients of a mount while others run, and all at once, this many times: make
# direct-clients ROUNDS=1000. Needs root.
direct-clients: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture direct_clients_are_killed direct_clients_work two_page_write

# PostgreSQL on the direct path, killed this many times with the mount and all bricks, with this
# many clients: make databases ROUNDS=50 CLIENTS=100. Needs root.
CLIENTS ?= 4
databases: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) PAGEMESH_TEST_CLIENTS=$(CLIENTS) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture postgresql::

# In-memory histories of a volume with direct clients, and crashes of direct clients in two pools:
# make direct-client-histories LIVES=100000 STORIES=20000.
LIVES ?= 20000
STORIES ?= 5000
direct-client-histories:
	PAGEMESH_SEEDS=$(LIVES) \
	$(CARGO) test --locked -p pagemesh-volume --test cluster -- --nocapture random_histories_with_direct_clients
	PAGEMESH_STORIES=$(STORIES) \
	$(CARGO) test --locked -p pagemesh-store --test enumerate -- --nocapture direct_writes_end_in_some_serial_order

# Earlier names of direct-clients and direct-client-histories, kept for scripts that call them.
guests: direct-clients
guest-lives: direct-client-histories

# This many processes on the direct path, in sequence and in parallel, far more than there are
# sessions: make crowd PROCESSES=1000. Needs root.
PROCESSES ?= 1000
crowd: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_PROCESSES=$(PROCESSES) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture direct::many_processes::

# Kills and stops programs with libpagemesh during atomic writes of several pages: make natives
# ROUNDS=1000. Needs root.
natives: setup
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture if_writers_are_killed

# Programs write to mapped files and sync while the mount is killed this many times: make mapped
# ROUNDS=200. Needs root.
mapped: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture mapped::

# Random file operations on a mount, compared with the same in memory, with remounts and kills, also
# by several direct clients at once: make fsx OPS=10000000 SEED=7. Needs root.
OPS ?= 10000000
fsx: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_FSX_OPS=$(OPS) PAGEMESH_FSX_SEED=$(SEED) \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture fsx::

# Random operations through the C library, bare system calls, io_uring and a plug-in at once, on the
# kernel path or, with EXEC=1, on the direct path: make doors OPS=1000000 SEED=7 EXEC=1. Needs root.
# WITH=ends adds appends, and seeks beyond the end that the direct path just extended (RFD 022).
doors: OPS = 1000000
WITH ?=
doors: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_DOORS_OPS=$(OPS) PAGEMESH_DOORS_SEED=$(SEED) PAGEMESH_DOORS_WITH="$(WITH)" \
	$(CARGO) test --locked -p pagemesh --test it -- --nocapture --include-ignored \
	$(if $(EXEC),io_paths_under_exec,io_paths_through_kernel)

# Flips 100 single bits in each of this many images of closed pools, and as many of crashed ones, in
# memory and in files: make flips POOLS=101.
POOLS ?= 101
flips:
	PAGEMESH_POOLS=$(POOLS) PAGEMESH_FLIPS=100 \
	$(CARGO) test --locked -p pagemesh-store --test it damage::flips

# The POSIX test suite on a mount, as root: make pjdfstest TESTS=rename FUSE=io-uring; EXEC=1
# selects the direct path.
TESTS ?=
pjdfstest: setup all
	@scripts/pjdfstest target/release/pagemesh $(TESTS)

# git, cargo, rsync, tar, cp and find on a mount, each compared with the same on a tmpfs, as root:
# make programs TRANSPORT=tcp FILES=1000000; EXEC=1 selects the direct path.
TRANSPORT ?= auto
FILES ?= 1000000
programs: setup all
	@scripts/programs target/release/pagemesh $(TRANSPORT) $(FILES)

# Times of the manager's API with 100 simulated bricks and 4096 volumes, and its memory.
bench-api:
	$(CARGO) test --release --locked -p pagemesh-manage --test it -- --ignored --nocapture scale::

# Every number of docs/performance/measurements.md; raw results go to bench/runs/.
bench: setup all
	@scripts/setup glusterfs
	@scripts/bench target/release/pagemesh
