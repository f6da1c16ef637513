# `make test` and `make demo` are the only set-up a stranger needs, on Debian
# or Ubuntu with Rust: both install what is missing.
CARGO ?= cargo

.PHONY: all install test check deny setup demo bench sim storm kills guests guest-lives natives crowd databases mapped flips fsx doors pjdfstest programs
all:
	$(CARGO) build --release --locked -p pagemesh -p pagemesh-preload

# The command, the library of the direct path, and the helpers of mount(8) and umount(8), for
# lines of type pagemesh in /etc/fstab: make install, as root. DESTDIR for packages.
PREFIX ?= /usr/local
SBIN ?= /sbin
install: all
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(SBIN)
	install target/release/pagemesh $(DESTDIR)$(PREFIX)/bin/
	install -m 644 target/release/libpagemesh_preload.so $(DESTDIR)$(PREFIX)/lib/
	ln -sf $(PREFIX)/bin/pagemesh $(DESTDIR)$(SBIN)/mount.pagemesh
	ln -sf $(PREFIX)/bin/pagemesh $(DESTDIR)$(SBIN)/umount.fuse.pagemesh

test: setup check deny
	$(CARGO) test --workspace --locked

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

# Without advisories: their database is not on a registry of packages.
deny:
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny --all-features check bans licenses sources

# Packages of the clients that tests, the demo and the measurements use.
setup:
	@scripts/setup

demo: setup all
	@scripts/demo target/release/pagemesh

# Histories of the cluster simulation: make sim SEEDS=50000. Others: KIND=--files,
# KIND=--guests.
SEEDS ?= 2000
KIND ?=
sim:
	$(CARGO) xtask sim --seeds $(SEEDS) $(KIND)

# Bricks, manager and clients killed, stopped and cut off under a checked load,
# several at once, so often, in the order of a seed: make storm ROUNDS=100 SEED=7.
# Cutting off needs root.
storm: ROUNDS = 100
SEED ?= 1
storm: setup
	PAGEMESH_STORM_ROUNDS=$(ROUNDS) PAGEMESH_STORM_SEED=$(SEED) \
	$(CARGO) test --locked -p pagemesh --test faults -- --nocapture storm::

# Clients killed under load, so many times per layout: make kills ROUNDS=50.
ROUNDS ?= 50
kills: setup
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test faults -- --nocapture clients::the_client

# Guests of a mount killed and stopped beside others, and everybody at once, so many times:
# make guests ROUNDS=1000. Needs root.
guests: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test direct -- --nocapture guests_are_killed guests_work two_pages

# PostgreSQL on the direct path, killed with the mount and all bricks so many times, under so
# many clients: make databases ROUNDS=50 CLIENTS=100. Needs root.
CLIENTS ?= 4
databases: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) PAGEMESH_TEST_CLIENTS=$(CLIENTS) \
	$(CARGO) test --locked -p pagemesh --test postgresql -- --nocapture

# Lives of a volume with guests, and crashes of guests in two pools, in memory:
# make guest-lives LIVES=100000 STORIES=20000.
LIVES ?= 20000
STORIES ?= 5000
guest-lives:
	PAGEMESH_SEEDS=$(LIVES) \
	$(CARGO) test --locked -p pagemesh-volume --lib -- --nocapture lives_with_guests
	PAGEMESH_STORIES=$(STORIES) \
	$(CARGO) test --locked -p pagemesh-store --lib -- --nocapture guests_leave

# So many processes on the direct path, one after the other and at the same time, far more
# than there are sessions: make crowd PROCESSES=1000. Needs root.
PROCESSES ?= 1000
crowd: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_PROCESSES=$(PROCESSES) \
	$(CARGO) test --locked -p pagemesh --test direct -- --nocapture crowd::

# Programs with libpagemesh killed and stopped while they write several pages as a whole:
# make natives ROUNDS=1000. Needs root.
natives: setup
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test native -- --nocapture though_writers

# Programs that store into mapped files and sync, while the mount is killed so many times:
# make mapped ROUNDS=200. Needs root.
mapped: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_TEST_ROUNDS=$(ROUNDS) \
	$(CARGO) test --locked -p pagemesh --test mapped -- --nocapture

# Random operations on files of a mount beside the same in memory, with remounts
# and kills, also by guests and others at once: make fsx OPS=10000000 SEED=7. Needs root.
OPS ?= 10000000
fsx: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_FSX_OPS=$(OPS) PAGEMESH_FSX_SEED=$(SEED) \
	$(CARGO) test --locked -p pagemesh --test fsx -- --nocapture

# Random operations through the C library, bare system calls, io_uring and a plug-in at once, by the
# kernel or, with EXEC=1, on the direct path: make doors OPS=1000000 SEED=7 EXEC=1. Needs root.
# WITH=ends adds appends and seeks behind what the direct path just made longer (RFD 022).
doors: OPS = 1000000
WITH ?=
doors: setup
	$(CARGO) build --locked -p pagemesh-preload
	PAGEMESH_DOORS_OPS=$(OPS) PAGEMESH_DOORS_SEED=$(SEED) PAGEMESH_DOORS_WITH="$(WITH)" \
	$(CARGO) test --locked -p pagemesh --test direct -- --nocapture --include-ignored \
	$(if $(EXEC),doors_under_exec,doors_by_the_kernel)

# Single flipped bits in images of so many closed pools and as many crashed
# ones, in memory and in files, 100 in each: make flips POOLS=101.
POOLS ?= 101
flips:
	PAGEMESH_POOLS=$(POOLS) PAGEMESH_FLIPS=100 \
	$(CARGO) test --locked -p pagemesh-store --test damage flipped_bit

# The POSIX test suite on a mount, as root: make pjdfstest TESTS=rename FUSE=io-uring,
# or EXEC=1, then on the direct path.
TESTS ?=
pjdfstest: setup all
	@scripts/pjdfstest target/release/pagemesh $(TESTS)

# git, cargo, rsync, tar, cp and find on a mount, each compared with the same on a
# tmpfs, as root: make programs TRANSPORT=tcp FILES=1000000, or EXEC=1.
TRANSPORT ?= auto
FILES ?= 1000000
programs: setup all
	@scripts/programs target/release/pagemesh $(TRANSPORT) $(FILES)

# Every figure of docs/performance.md; raw results go to bench/runs/.
bench: setup all
	@scripts/setup glusterfs
	@scripts/bench target/release/pagemesh
