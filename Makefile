# `make test` is the only set-up a stranger needs: Debian or Ubuntu with Rust.
CARGO ?= cargo

.PHONY: test check deny
test: check deny
	$(CARGO) test --workspace --locked

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

deny:
	@command -v cargo-deny >/dev/null || $(CARGO) install --locked cargo-deny
	$(CARGO) deny --all-features check bans licenses sources
